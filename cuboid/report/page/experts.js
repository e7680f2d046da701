// How busy each expert is, over the mean one of its layer: a cell per layer and expert, and per layer and window of steps.
function drawExperts(data) {
  const info = data.experts;
  if (!info) return null;
  const LEFT = 62, BOTTOM = 22, tall = info.layers.length > 24 ? 9 : 16, least = 0.25;
  const colour = (load) => load === 0 ? colourOf("--warn") : ramp(100 * Math.min(1, Math.max(0, Math.log(load / least) / Math.log(info.most / least))), 101).fill;
  const span = ([first, last]) => first === last ? `step ${last.toLocaleString("en")}` : `steps ${first.toLocaleString("en")} to ${last.toLocaleString("en")}`;
  let frame = info.frames.at(-1);
  // One heat map: a row per layer, `columns` cells, `load(row, column)` the colour, `tell` the words.
  const heat = (label, columns, load, tell, mark) => {
    const canvas = el("canvas", { class: "chart", role: "img", "aria-label": `${label}; the numbers are in the table below` });
    let wide = 0;
    const draw = (width) => {
      const count = columns(), height = info.layers.length * tall + BOTTOM, ratio = devicePixelRatio || 1;
      wide = (width - LEFT - 4) / count;
      canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = `${height}px`;
      const pen = canvas.getContext("2d"); pen.scale(ratio, ratio); pen.clearRect(0, 0, width, height);
      pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
      info.layers.forEach((layer, row) => {
        const y = row * tall;
        for (let column = 0; column < count; column += 1) { pen.fillStyle = colour(load(row, column)); pen.fillRect(LEFT + column * wide, y, wide > 4 ? wide - 1 : wide + 0.2, tall - 1); }
        pen.fillStyle = colourOf("--soft"); pen.textAlign = "right";
        if (tall > 12 || row % 4 === 0) pen.fillText(`layer ${layer}`, LEFT - 6, y + Math.min(tall, 13) - 2);
      });
      pen.fillStyle = colourOf("--soft"); pen.textAlign = "left"; pen.fillText(mark(0), LEFT, height - 6);
      pen.textAlign = "right"; if (count > 1) pen.fillText(mark(count - 1), width - 4, height - 6);
    };
    canvas.addEventListener("pointermove", (event) => {
      const area = canvas.getBoundingClientRect(), row = Math.floor((event.clientY - area.top) / tall), column = Math.floor((event.clientX - area.left - LEFT) / wide);
      if (row >= 0 && row < info.layers.length && column >= 0 && column < columns()) showTip(tell(row, column), event.clientX, event.clientY); else hideTip();
    });
    canvas.addEventListener("pointerleave", hideTip);
    return [canvas, draw];
  };
  const [now, fillNow] = heat("Load of each expert of each layer over the mean", () => info.experts, (row, column) => frame.loads[row][column] / 100,
    (row, column) => `layer ${info.layers[row]}, expert ${column}\n${frame.loads[row][column] ? `${figures(frame.loads[row][column] / 100)} × the mean` : "no token"} in ${span([frame.first, frame.step])}`, (column) => `expert ${column}`);
  const [past, fillPast] = heat("Load of the busiest expert of each layer over time", () => info.steps.length, (row, column) => info.busiest[column][row],
    (row, column) => `layer ${info.layers[row]}, ${span(info.steps[column])}\nbusiest expert ${figures(info.busiest[column][row])} × the mean, ${words(info.idle[column][row], "expert")} without a token`, (column) => span(info.steps[column]));
  const numbers = el("div", {});
  const tell = () => numbers.replaceChildren(table([{ label: "layer" }, { label: "busiest expert", number: true }, { label: "its load over the mean", number: true }, { label: "without a token", number: true }],
    frame.loads.map((loads, row) => { const most = Math.max(...loads); return [String(info.layers[row]), String(loads.indexOf(most)), figures(most / 100), String(loads.filter((load) => load === 0).length)]; }), `In ${span([frame.first, frame.step])}.`));
  const holder = el("div", {}, now, info.steps.length > 1 ? [el("p", { class: "note" }, "The busiest expert of each layer, over time:"), past] : null);
  const draw = (width) => { fillNow(width); if (info.steps.length > 1) fillPast(width); };
  onResize(holder, draw); tell();
  const idle = info.idle.at(-1).reduce((sum, count) => sum + count, 0);
  return section("experts", "Experts", `How busy each expert is, over the mean expert of its layer: 1 is balance, ${figures(info.most)} the most there can be. In ${span(info.steps.at(-1))} the busiest has ${figures(Math.max(...info.busiest.at(-1)))} × the mean, and ${idle ? `${words(idle, "expert")} had no token` : "every expert had tokens"}.`,
    info.frames.length > 1 ? el("div", { class: "controls" }, choice("Window", info.frames.map((each, index) => [String(index), span([each.first, each.step])]), String(info.frames.length - 1), (index) => { frame = info.frames[index]; tell(); draw(holder.clientWidth); })) : null,
    holder, legend([["--warn", "no token"]].map(([name, text]) => [swatch(name), text]).concat([least, 1, info.most].map((load) => [sv("svg", { width: 16, height: 14, "aria-hidden": "true" }, sv("rect", { width: 16, height: 14, rx: 3, style: `fill:${colour(load)}` })), load === least ? `${load} × the mean or less` : load === 1 ? "the mean" : `${figures(load)} ×`]))),
    el("details", {}, el("summary", {}, "Numbers"), numbers));
}
