const MEMORY_COLOURS = { weights: "--c0", gradients: "--c5", optimizer: "--c2", activations: "--c4", logits: "--c8", transient: "--c1", buffers: "--c6", reserve: "--c7", rest: "--c3" };
// Pale colours want dark letters in both themes.
const DARK_ON = new Set(["gradients", "activations", "rest", "reserve"]);
function drawMemory(data) {
  const info = data.memory;
  if (!info) return null;
  const stages = [...new Set([...info.predicted, ...info.measured].map((line) => line.pp))].sort((a, b) => a - b);
  const bars = stages.flatMap((pp) => [["predicted", info.predicted.find((line) => line.pp === pp)], ["measured", info.measured.find((line) => line.pp === pp)]].filter(([, line]) => line).map(([what, line]) => ({ pp, what, line, total: Object.values(line.parts).reduce((sum, value) => sum + value, 0) })));
  const most = Math.max(...bars.map((bar) => bar.total)), near = info.limit && info.limit < most * 4;
  const used = Object.keys(info.categories).filter((name) => bars.some((bar) => bar.line.parts[name] > 0));
  const both = info.predicted.length > 0 && info.measured.length > 0, tall = both ? 15 : 18, gap = both ? 12 : 6;
  const holder = el("div", {});
  onResize(holder, (width) => {
    const left = both ? 128 : 62, right = 76, inner = Math.max(60, width - left - right), top = Math.max(most, near ? info.limit : 0) * 1.02, x = (value) => left + value / top * inner;
    const height = stages.length * gap + bars.length * (tall + 2) + 30, plot = height - 24;
    const marks = ticks(0, top / 2 ** 30, Math.max(2, Math.floor(inner / 90)));
    const picture = sv("svg", { class: "chart", height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Memory by category for every pipeline rank" },
      marks.map((at) => [sv("line", { class: "grid", x1: x(at * 2 ** 30), x2: x(at * 2 ** 30), y1: 0, y2: plot }), sv("text", { class: "soft", x: x(at * 2 ** 30), y: height - 8, "text-anchor": "middle" }, `${figures(at)} GiB`)]));
    let y = 4, last = null;
    for (const bar of bars) {
      if (last !== null && last !== bar.pp) y += gap;
      const first = last !== bar.pp; last = bar.pp;
      let at = 0;
      const told = `pipeline rank ${bar.pp}, ${bar.what}${bar.what === "measured" ? ` on rank ${bar.line.rank}` : ""}: ${bytes(bar.total)}`;
      if (first) picture.append(sv("text", { x: left - (both ? 76 : 8), y: y + tall - 3, "text-anchor": "end" }, `rank ${bar.pp}`));
      if (both) picture.append(sv("text", { class: "soft", x: left - 8, y: y + tall - 3, "text-anchor": "end" }, bar.what));
      for (const name of used) {
        const value = bar.line.parts[name]; if (!value) continue;
        const wide = x(at + value) - x(at);
        const text = `${told}\n${name}: ${bytes(value)} (${percent(value / bar.total)})\n${info.categories[name]}`;
        picture.append(sv("rect", { x: x(at), y, width: Math.max(wide - 0.7, 0.4), height: tall, style: `fill:var(${MEMORY_COLOURS[name]})`, onpointermove: (event) => showTip(text, event.clientX, event.clientY), onpointerleave: hideTip }));
        if (wide > 64) picture.append(sv("text", { x: x(at) + wide / 2, y: y + tall - 4, "text-anchor": "middle", style: `fill:${DARK_ON.has(name) ? "#111" : "var(--on-colour)"};font-size:11px;pointer-events:none` }, name));
        at += value;
      }
      picture.append(sv("text", { x: x(at) + 6, y: y + tall - 3 }, bytes(bar.total)));
      y += tall + 2;
    }
    if (near) picture.append(sv("line", { x1: x(info.limit), x2: x(info.limit), y1: 0, y2: plot, style: "stroke:var(--warn);stroke-width:2;stroke-dasharray:5 3" }), sv("text", { x: x(info.limit) - 6, y: plot - 2, "text-anchor": "end", style: "fill:var(--warn)" }, `limit ${bytes(info.limit)}`));
    holder.replaceChildren(picture);
  });
  const lines = bars.map((bar) => [`${bar.pp}`, bar.what, bytes(bar.total), ...used.map((name) => bar.line.parts[name] ? bytes(bar.line.parts[name]) : "–")]);
  return section("memory", "Memory", `Of every pipeline rank${info.measured.length ? ", predicted beside measured; of ranks that share a stage, the fullest" : " at its fullest moment, as predicted"}.`,
    holder, legend(used.map((name) => [swatch(MEMORY_COLOURS[name], name.slice(0, 2)), `${name}: ${info.categories[name]}`])),
    info.limit && !near ? el("p", { class: "note" }, `Each accelerator has ${bytes(info.limit)}, far beyond the right edge.`) : null,
    info.measured.length ? el("p", { class: "note" }, `Measured on ${words(info.measured_ranks, "rank")}: ${info.how}. Weights, gradients and optimizer state are the bytes of their tensors; the rest is what remains of the peak.`) : data.kind === "run" ? el("p", { class: "note" }, "No rank has written its memory yet.") : null,
    el("details", {}, el("summary", {}, "Numbers"), table(["rank", "", { label: "total", number: true }, ...used.map((name) => ({ label: name, number: true }))], lines)));
}
