// Who computes and who waits, rank by rank.
const TIME_COLOURS = { compute: "--c0", wait: "--c7", data: "--c4", save: "--c2" };
function drawRankTime(data) {
  const info = data.rank_time;
  if (!info) return null;
  const names = Object.keys(info.parts), total = (row) => names.reduce((sum, name) => sum + row.parts[name], 0), most = Math.max(...info.ranks.map(total));
  const tall = info.ranks.length > 40 ? 8 : 16, holder = el("div", {});
  onResize(holder, (width) => {
    const left = 66, right = 70, inner = Math.max(60, width - left - right), x = (value) => left + value / most * inner, height = info.ranks.length * (tall + 3) + 28;
    const picture = sv("svg", { class: "chart", height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "What a step of each rank is made of; the numbers are in the table below" },
      ticks(0, most, Math.max(2, Math.floor(inner / 100))).map((at) => [sv("line", { class: "grid", x1: x(at), x2: x(at), y1: 0, y2: height - 24 }), sv("text", { class: "soft", x: x(at), y: height - 8, "text-anchor": "middle" }, seconds(at))]));
    info.ranks.forEach((row, index) => {
      const y = 2 + index * (tall + 3); let at = 0;
      if (tall > 10 || index % 4 === 0) picture.append(sv("text", { x: left - 8, y: y + Math.min(tall, 12), "text-anchor": "end" }, `rank ${row.rank}`));
      for (const name of names) {
        const value = row.parts[name], wide = x(at + value) - x(at); if (!value) continue;
        picture.append(sv("rect", { x: x(at), y, width: Math.max(wide - 0.6, 0.3), height: tall, style: `fill:var(${TIME_COLOURS[name]})`, onpointermove: (event) => showTip(`rank ${row.rank}, pipeline rank ${row.pp}\n${info.parts[name]}: ${seconds(value)} of ${seconds(total(row))}`, event.clientX, event.clientY), onpointerleave: hideTip }));
        if (tall > 10 && wide > 58) picture.append(sv("text", { x: x(at) + wide / 2, y: y + 12, "text-anchor": "middle", style: `fill:${name === "compute" ? "var(--on-colour)" : "#111"};font-size:11px;pointer-events:none` }, name));
        at += value;
      }
      if (tall > 10) picture.append(sv("text", { class: "soft", x: x(at) + 6, y: y + 12 }, seconds(total(row))));
    });
    holder.replaceChildren(picture);
  });
  const slow = info.slowest;
  return section("rank_time", "Who waits for whom", `What a step of each rank was made of, up to step ${info.step}. In a step all take as long as the slowest: a rank that waits little is the one the others wait for.${info.ranks.length < info.of ? ` Of ${info.of} ranks those that wait least and most are shown.` : ""}`,
    holder, legend(names.map((name) => [swatch(TIME_COLOURS[name], name[0].toUpperCase()), info.parts[name]])),
    slow ? el("p", { class: "note" }, `Furthest behind those of its stage: rank ${slow.rank}, with ${seconds(slow.seconds)} of its own a step against ${seconds(slow.peers)}; the difference is in ${slow.because}.`) : null,
    el("details", {}, el("summary", {}, "Numbers"), table([{ label: "rank" }, ...names.map((name) => ({ label: info.parts[name], number: true }))], info.ranks.map((row) => [String(row.rank), ...names.map((name) => seconds(row.parts[name]))]))));
}
