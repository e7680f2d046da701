// Small charts over one axis, with a line that follows the pointer or the arrow keys through all of them.
const EVENT_MARKS = { failure: ["✕", "--warn", "failure and restart"], checkpoint: ["◆", "--c2", "checkpoint"], skipped: ["!", "--c1", "bad step"], warning: ["▲", "--warn", "warning"], other: ["●", "--c3", "other event"] };
function drawCurves(data) {
  const info = data.curves;
  if (!info) return data.kind === "run" ? section("curves", "Over time", "No step has ended yet.") : null;
  const count = info.steps.length, timed = info.times.every((time) => time !== null);
  let byTime = false, logarithmic = false, at = null;
  const axis = () => byTime ? info.times.map((time) => (time - info.times[0]) / 60) : info.steps;
  const holder = el("div", { tabindex: 0, role: "application", "aria-label": "Measurements over the steps. Left and right arrows move through the steps." });
  const said = el("div", { class: "panel", "aria-live": "polite" });
  const left = 62, right = 14, tall = 96, gap = 30;
  let geometry = null;
  const indexOfStep = (step) => { let index = info.steps.findIndex((entry) => entry >= step); return index < 0 ? count - 1 : index; };
  const path = (xs, ys, x, y) => { let text = "", open = false; ys.forEach((value, index) => { if (value === null || value === undefined) { open = false; return; } text += `${open ? "L" : "M"}${x(xs[index]).toFixed(1)} ${y(value).toFixed(1)}`; open = true; }); return text; };
  const draw = (width) => {
    const xs = axis(), low = xs[0], high = xs.at(-1) > low ? xs.at(-1) : low + 1, inner = width - left - right, x = (value) => left + (value - low) / (high - low) * inner;
    const charts = info.series.filter((series) => series.middle.some((value) => value !== null)), events = info.events;
    const height = charts.length * (tall + gap) + 34, picture = sv("svg", { class: "chart", height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    const marks = ticks(low, high, Math.max(2, Math.floor(inner / 90))).filter((value) => byTime || Number.isInteger(value));
    charts.forEach((series, number) => {
      const top = number * (tall + gap) + 18, bottom = top + tall, useLog = logarithmic && series.name !== "learning_rate";
      const extra = series.name === "loss" ? info.validation.map(([, value]) => value) : [];
      const known = [...(series.low || series.middle), ...(series.high || []), ...series.middle, ...extra].filter((value) => value !== null && (!useLog || value > 0));
      let floor = Math.min(...known), ceiling = Math.max(...known);
      if (!useLog && floor > 0 && floor < ceiling * 0.5) floor = 0;
      if (ceiling === floor) { ceiling += Math.abs(ceiling) * 0.1 || 1; floor -= Math.abs(floor) * 0.1; }
      if (!useLog) { const marks = ticks(floor, ceiling, 3), step = marks.length > 1 ? marks[1] - marks[0] : (ceiling - floor) / 2; floor = Math.floor(floor / step + 1e-9) * step; ceiling = Math.ceil(ceiling / step - 1e-9) * step; }
      const f = useLog ? Math.log10 : (value) => value, y = (value) => bottom - (f(value) - f(floor)) / (f(ceiling) - f(floor)) * tall;
      picture.append(sv("text", { x: left, y: top - 6, style: "font-weight:600" }, `${series.label}${series.unit ? `, ${series.unit}` : ""}`));
      const levels = useLog ? [floor, Math.sqrt(floor * ceiling), ceiling] : ticks(floor, ceiling, 3);
      for (const level of levels) picture.append(sv("line", { class: "grid", x1: left, x2: width - right, y1: y(level), y2: y(level) }), sv("text", { class: "soft", x: left - 7, y: y(level) + 4, "text-anchor": "end" }, Math.abs(level) >= 1e4 ? amount(level) : figures(level)));
      for (const event of events) { const kind = EVENT_MARKS[event.kind] || EVENT_MARKS.other, px = x(xs[indexOfStep(event.step)]); picture.append(sv("line", { x1: px, x2: px, y1: top, y2: bottom, style: `stroke:var(${kind[1]});stroke-width:${event.kind === "failure" ? 1.6 : 0.8};stroke-dasharray:${event.kind === "failure" ? "4 3" : "1 4"}` })); }
      if (series.low) {
        const forth = path(xs, series.high, x, y), back = path([...xs].reverse(), [...series.low].reverse(), x, y).replace("M", "L");
        if (forth && !forth.slice(1).includes("M")) picture.append(sv("path", { d: `${forth}${back}Z`, style: "fill:var(--c0);opacity:.18" }));
      }
      picture.append(sv("path", { d: path(xs, series.middle.map((value) => useLog && value <= 0 ? null : value), x, y), style: "fill:none;stroke:var(--c0);stroke-width:1.7;stroke-linejoin:round" }));
      if (count === 1) picture.append(sv("circle", { cx: x(xs[0]), cy: y(series.middle[0]), r: 3.5, style: "fill:var(--c0)" }));
      if (series.name === "loss") for (const [step, value] of info.validation) picture.append(sv("path", { d: `M${x(xs[indexOfStep(step)])} ${y(value) - 4}l4 4-4 4-4-4z`, style: "fill:var(--c1);stroke:var(--card)" }));
      picture.append(sv("line", { class: "axis", x1: left, x2: width - right, y1: bottom, y2: bottom }));
      if (number === 0) for (const event of events) { const kind = EVENT_MARKS[event.kind] || EVENT_MARKS.other; picture.append(sv("text", { x: x(xs[indexOfStep(event.step)]), y: bottom + 13, "text-anchor": "middle", style: `fill:var(${kind[1]});font-size:${event.kind === "failure" ? 13 : 9}px;font-weight:700` }, kind[0])); }
    });
    const bottom = charts.length * (tall + gap) + 2;
    for (const value of marks) picture.append(sv("text", { class: "soft", x: Math.min(x(value), width - right - 8), y: bottom + 6, "text-anchor": "middle" }, byTime ? figures(value) : value.toLocaleString("en")));
    picture.append(sv("text", { class: "soft", x: left + inner / 2, y: bottom + 24, "text-anchor": "middle" }, byTime ? "minutes since the first step" : "step"));
    const cursor = sv("line", { y1: 10, y2: bottom - gap + 16, style: "stroke:var(--ink);stroke-width:1;opacity:.7;display:none" });
    picture.append(cursor); holder.replaceChildren(picture);
    geometry = { xs, x, cursor, low, high, inner };
    if (at !== null) point(at);
  };
  const point = (index) => {
    at = Math.max(0, Math.min(count - 1, index));
    const { xs, x, cursor } = geometry; cursor.setAttribute("x1", x(xs[at])); cursor.setAttribute("x2", x(xs[at])); cursor.style.display = "";
    const near = info.events.filter((event) => indexOfStep(event.step) === at).map((event) => event.text);
    const text = info.series.map((series) => series.middle[at] === null ? null : `${series.label} ${series.name === "tokens_per_second" ? figures(series.middle[at], 4) : figures(series.middle[at], 4)}${series.unit ? ` ${series.unit}` : ""}${series.low && series.low[at] !== series.high[at] ? ` (${figures(series.low[at])} to ${figures(series.high[at])})` : ""}`).filter(Boolean);
    said.textContent = `${info.each > 1 ? `${info.each} steps up to ` : "Step "}${info.steps[at].toLocaleString("en")}: ${text.join(", ")}${near.length ? `. ${near.join(". ")}` : ""}`;
  };
  holder.addEventListener("pointermove", (event) => { const { xs, low, high, inner } = geometry, value = low + (event.clientX - holder.getBoundingClientRect().left - left) / inner * (high - low); let best = 0; for (let index = 0; index < count; index += 1) if (Math.abs(xs[index] - value) < Math.abs(xs[best] - value)) best = index; point(best); });
  holder.addEventListener("keydown", (event) => { const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -count, End: count }[event.key]; if (step) { event.preventDefault(); point((at ?? (step > 0 ? -1 : count)) + step); } });
  onResize(holder, draw);
  said.textContent = "Point at the charts, or use the arrow keys, to read the numbers of a step.";
  const seen = [...new Set(info.events.map((event) => EVENT_MARKS[event.kind] ? event.kind : "other"))], failures = info.events.filter((event) => event.kind !== "checkpoint");
  const again = () => draw(holder.clientWidth);
  return section("curves", "Over time", info.each > 1 ? `${info.rows.toLocaleString("en")} steps; each point stands for up to ${info.each}: the line is the middle value, the band reaches from the lowest to the highest.` : `${words(info.rows, "step")}, every one of them.`,
    el("div", { class: "controls" }, timed && count > 1 ? choice("Axis", [["step", "step"], ["time", "time"]], "step", (value) => { byTime = value === "time"; again(); }) : null, toggle("Logarithmic", logarithmic, (on) => { logarithmic = on; again(); })),
    holder, legend([...seen.map((kind) => [sv("svg", { width: 16, height: 14, "aria-hidden": "true" }, sv("text", { x: 8, y: 12, "text-anchor": "middle", style: `fill:var(${EVENT_MARKS[kind][1]});font-weight:700` }, EVENT_MARKS[kind][0])), EVENT_MARKS[kind][2]]), ...(info.validation.length ? [[sv("svg", { width: 14, height: 14, "aria-hidden": "true" }, sv("path", { d: "M7 2l5 5-5 5-5-5z", style: "fill:var(--c1)" })), "validation loss"]] : [])]), said,
    info.spread ? el("p", { class: "note" }, `Step time: half of the steps took up to ${seconds(info.spread.p50)}, nineteen of twenty up to ${seconds(info.spread.p95)}, ninety-nine of a hundred up to ${seconds(info.spread.p99)}; the quickest twentieth ${seconds(info.spread.p5)} or less.`) : null,
    failures.length ? el("details", { open: true }, el("summary", {}, words(failures.length, "event").replace("events", "failures and other events").replace("event", "failure or other event")), el("ul", {}, failures.slice(0, 50).map((event) => el("li", {}, `step ${event.step}${event.time ? `, ${event.time}` : ""}: ${event.text}`)))) : null);
}
