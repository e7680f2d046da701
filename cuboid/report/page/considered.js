// Time against memory of the layouts there were to choose from.
function drawConsidered(data) {
  const info = data.considered;
  if (!info) return null;
  const names = Object.keys(info.parts), points = [...info.points].sort((a, b) => a.seconds - b.seconds), all = [info.own, ...points];
  const why = (point) => {
    if (point === info.own) return "the layout of this report";
    const lost = point.parts.map((value, index) => [value - info.own.parts[index], names[index]]).filter(([more]) => more > 0.002 * info.own.seconds).sort((a, b) => b[0] - a[0]).slice(0, 2).map(([more, name]) => `+${seconds(more)} ${info.parts[name]}`);
    const change = point.seconds / info.own.seconds - 1;
    const pace = `${percent(Math.abs(change))} ${change >= 0 ? "slower" : "faster"}`;
    return `${point.memory > info.capacity ? `does not fit: ${bytes(point.memory)} of ${bytes(info.capacity)}; ` : point.fits ? "" : `over the limit of ${bytes(info.limit)}; `}${pace}${lost.length ? ` (${lost.join(", ")})` : ""}`;
  };
  const holder = el("div", { tabindex: 0, role: "application", "aria-label": "Layouts by time and memory. Left and right arrows walk through them from the fastest." });
  const said = el("div", { class: "panel", "aria-live": "polite" }, "Point at a layout, or walk with the arrow keys from the fastest to the slowest, to see why it was not chosen.");
  const left = 66, right = 16, top = 14, height = 380, bottom = height - 44;
  let picture = null, ring = null, at = null, place = null;
  const tell = (point) => { said.replaceChildren(el("p", {}, el("strong", { class: "layout" }, point.layout)), el("p", {}, `${seconds(point.seconds)} a step, ${bytes(point.memory)} on the fullest rank: ${why(point)}`)); const [px, py] = place(point); ring.setAttribute("cx", px); ring.setAttribute("cy", py); ring.style.display = ""; };
  onResize(holder, (width) => {
    const times = all.map((point) => point.seconds), low = Math.min(...times) * 0.95, high = Math.min(Math.max(...times), Math.min(...times) * 100) * 1.05;
    const most = Math.min(Math.max(...all.map((point) => point.memory)), info.capacity * 4), roof = Math.max(most, info.limit) * 1.05;
    const x = (value) => left + Math.min(1, Math.log(value / low) / Math.log(high / low)) * (width - left - right), y = (value) => bottom - Math.min(1, value / roof) * (bottom - top);
    place = (point) => [x(point.seconds), y(point.memory)];
    const marks = []; for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) for (const factor of width > 700 ? [1, 1.5, 2, 3, 5, 7] : [1, 2, 5]) { const value = factor * 10 ** power; if (value >= low && value <= high) marks.push(value); }
    const kept = []; for (const value of marks) if (!kept.length || x(value) - x(kept.at(-1)) > 48) kept.push(value);
    picture = sv("svg", { class: "chart", height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
      kept.map((value) => [sv("line", { class: "grid", x1: x(value), x2: x(value), y1: top, y2: bottom }), sv("text", { class: "soft", x: x(value), y: bottom + 17, "text-anchor": "middle" }, seconds(value, 2))]),
      ticks(0, roof / 2 ** 30, 5).map((value) => [sv("line", { class: "grid", x1: left, x2: width - right, y1: y(value * 2 ** 30), y2: y(value * 2 ** 30) }), sv("text", { class: "soft", x: left - 7, y: y(value * 2 ** 30) + 4, "text-anchor": "end" }, figures(value))]),
      sv("text", { class: "soft", x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, "seconds a step (logarithmic)"),
      sv("text", { class: "soft", transform: `translate(13 ${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, "GiB on the fullest rank"));
    for (const point of points) { const [px, py] = place(point); picture.append(point.fits ? sv("circle", { cx: px, cy: py, r: 3, style: "fill:var(--c0);opacity:.5" }) : sv("path", { d: `M${px - 3} ${py - 3}l6 6m0-6l-6 6`, style: "stroke:var(--c1);stroke-width:1.3;opacity:.6" })); }
    picture.append(sv("line", { x1: left, x2: width - right, y1: y(info.limit), y2: y(info.limit), style: "stroke:var(--warn);stroke-width:1.5;stroke-dasharray:5 3" }), sv("text", { x: width - right - 4, y: y(info.limit) - 5, "text-anchor": "end", style: "fill:var(--warn)" }, `limit ${bytes(info.limit)}`));
    const [px, py] = place(info.own);
    picture.append(sv("path", { d: star(px, py), style: "fill:var(--c4);stroke:var(--ink);stroke-width:1.2" }));
    ring = sv("circle", { r: 8, style: "fill:none;stroke:var(--ink);stroke-width:2;display:none" }); picture.append(ring);
    holder.replaceChildren(picture); if (at !== null) tell(all[at]);
  });
  const star = (px, py) => { let text = ""; for (let index = 0; index < 10; index += 1) { const radius = index % 2 ? 4 : 9, angle = Math.PI * index / 5 - Math.PI / 2; text += `${index ? "L" : "M"}${px + radius * Math.cos(angle)} ${py + radius * Math.sin(angle)}`; } return `${text}Z`; };
  const nearest = (event) => { const area = holder.getBoundingClientRect(), px = event.clientX - area.left, py = event.clientY - area.top; let best = null, least = 24 ** 2; all.forEach((point, index) => { const [qx, qy] = place(point), far = (qx - px) ** 2 + (qy - py) ** 2; if (far < least) { least = far; best = index; } }); return best; };
  holder.addEventListener("pointermove", (event) => { const best = nearest(event); if (best === null) { hideTip(); return; } at = best; tell(all[at]); showTip(`${all[at].layout}\n${seconds(all[at].seconds)} a step, ${bytes(all[at].memory)}\n${why(all[at])}`, event.clientX, event.clientY); });
  holder.addEventListener("pointerleave", hideTip);
  holder.addEventListener("keydown", (event) => { const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20, Home: -all.length, End: all.length }[event.key]; if (step) { event.preventDefault(); at = Math.max(0, Math.min(all.length - 1, (at ?? -1) + step)); tell(all[at]); } });
  const shape = (child, text) => [sv("svg", { width: 18, height: 18, "aria-hidden": "true" }, child), text];
  return section("considered", "Layouts considered", `${info.looked_at.toLocaleString("en")} layouts in closed form; ${words(points.length, "point")} drawn: the fastest that fit, and a sample of the rest${info.beyond ? ` (${info.beyond.toLocaleString("en")} would need more than three times the memory or thirty times the time)` : ""}. The chosen one stands where its simulation puts it.`,
    holder, legend([shape(sv("path", { d: star(9, 9), style: "fill:var(--c4);stroke:var(--ink)" }), "this layout"), shape(sv("circle", { cx: 9, cy: 9, r: 4, style: "fill:var(--c0)" }), "fits"), shape(sv("path", { d: "M5 5l8 8m0-8l-8 8", style: "stroke:var(--c1);stroke-width:1.6" }), "does not fit")]), said);
}
