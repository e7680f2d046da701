// A map of layers × steps for each norm; colours are logarithmic, from the least to the largest value shown.
function drawLayers(data) {
  const info = data.layers;
  if (!info) return null;
  let kind = info.kinds[0];
  const left = 76, bottom = 22, picture = el("canvas", { style: "width:100%;display:block", role: "img" });
  const said = el("div", { class: "panel", "aria-live": "polite" }), scale = el("p", { class: "note" }), numbers = el("div", {});
  const colour = (fraction) => ramp(100 * fraction, 101).fill;
  const called = (place) => /^\d+$/.test(place) ? `layer ${place}` : place;
  const range = () => { const known = kind.values.flat().filter((value) => value > 0); return [Math.min(...known), Math.max(...known)]; };
  // Between whole pixels: no seams where cells are a fraction of one wide.
  const fillCell = (pen, x, y, wide, tall) => pen.fillRect(Math.round(x), Math.round(y), Math.round(x + wide) - Math.round(x), Math.round(y + tall) - Math.round(y));
  let geometry = null;
  const draw = (width) => {
    const count = kind.places.length, tall = Math.max(4, Math.min(18, 520 / count)), height = count * tall + bottom, density = window.devicePixelRatio || 1;
    picture.width = width * density; picture.height = height * density; picture.style.height = `${height}px`;
    picture.setAttribute("aria-label", `${kind.label}: ${count} places × ${words(info.steps.length, "step")}`);
    const pen = picture.getContext("2d"), wide = (width - left) / info.steps.length, [low, high] = range(), span = Math.log(high / low) || 1;
    pen.scale(density, density); pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
    const ink = getComputedStyle(document.documentElement).getPropertyValue("--ink") || "gray", every = Math.max(1, Math.ceil(13 / tall));
    kind.places.forEach((place, row) => {
      if (row % every === 0 || place === "head") { pen.fillStyle = ink; pen.textAlign = "right"; pen.fillText(called(place), left - 6, (row + 0.5) * tall); }
      kind.values.forEach((column, at) => { if (column[row] > 0) { pen.fillStyle = colour(Math.log(column[row] / low) / span); fillCell(pen, left + at * wide, row * tall, wide, tall); } });
    });
    pen.fillStyle = ink; pen.textAlign = "left"; pen.fillText(`step ${info.steps[0].toLocaleString("en")}`, left, height - bottom / 2);
    pen.textAlign = "right"; pen.fillText(info.steps.at(-1).toLocaleString("en"), width, height - bottom / 2);
    scale.textContent = `From ${figures(low)} (dark) to ${figures(high)} (bright).`;
    geometry = { wide, tall };
  };
  const list = () => {
    const [first, last] = [kind.values[0], kind.values.at(-1)];
    numbers.replaceChildren(table(["place", { label: `step ${info.steps[0]}`, number: true }, { label: `step ${info.steps.at(-1)}`, number: true }], kind.places.map((place, row) => [called(place), figures(first[row]), figures(last[row])])));
  };
  picture.addEventListener("pointermove", (event) => {
    const bounds = picture.getBoundingClientRect(), at = Math.floor((event.clientX - bounds.left - left) / geometry.wide), row = Math.floor((event.clientY - bounds.top) / geometry.tall);
    if (at >= 0 && at < info.steps.length && row < kind.places.length) said.textContent = `Step ${info.steps[at].toLocaleString("en")}, ${called(kind.places[row])}: ${kind.label} ${figures(kind.values[at][row], 4)}`;
  });
  onResize(picture, draw); list();
  said.textContent = "Point at the map to read a number.";
  const more = info.measured > info.steps.length ? `${words(info.measured, "measured step")}, of which ${info.steps.length} are shown.` : `${words(info.measured, "measured step")}.`;
  return section("layers", "By layer", more, el("div", { class: "controls" }, choice("Show", info.kinds.map((each) => [each.name, each.label]), kind.name, (name) => { kind = info.kinds.find((each) => each.name === name); draw(picture.clientWidth); list(); })), picture, scale, said, el("details", {}, el("summary", {}, "Numbers"), numbers));
}
