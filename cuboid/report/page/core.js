// Elements, numbers with units, tooltips and the theme. Text from the data only ever becomes text nodes.
const SVG = "http://www.w3.org/2000/svg";
const make = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
};
const el = (tag, attributes, ...children) => make(document.createElement(tag), attributes, children);
const sv = (tag, attributes, ...children) => make(document.createElementNS(SVG, tag), attributes, children);
const words = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const figures = (value, digits = 3) => {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(digits - 1).replace(/\.?0*e\+?/, "e");
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
};
const scaled = (value, units, base, digits = 3) => {
  let index = 0;
  while (index + 1 < units.length && Math.abs(value) >= base ** (index + 1)) index += 1;
  return `${figures(value / base ** index, digits)} ${units[index]}`.trim();
};
const bytes = (value) => value === null || value === undefined ? "–" : scaled(value, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
const amount = (value) => value === null || value === undefined ? "–" : scaled(value, ["", "K", "M", "B", "T"], 1000);
const percent = (value, digits = 1) => value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;
const seconds = (value, digits = 3) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 7200) return `${figures(value / 3600, digits)} h`;
  if (size >= 1 || size === 0) return `${figures(value, digits)} s`;
  return size >= 1e-3 ? `${figures(value * 1e3, digits)} ms` : `${figures(value * 1e6, digits)} µs`;
};
const section = (id, title, lead, ...children) =>
  el("section", { class: "card", id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), lead && el("p", { class: "lead" }, lead), children);
const notes = (list) => (list || []).map((text) => el("p", { class: "note" }, text));
const table = (heads, rows, caption) =>
  el("div", { class: "scroll" }, el("table", {}, caption && el("caption", { class: "note" }, caption),
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col", class: head.number && "number" }, head.label || head)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, index) => el(index ? "td" : "th", { scope: index ? null : "row", class: heads[index].number && "number" }, cell)))))));
const choice = (label, options, value, change) => {
  const menu = el("select", { onchange: () => change(menu.value) }, options.map(([key, text]) => el("option", { value: key, selected: key === value }, text)));
  return el("label", {}, label, menu);
};
const toggle = (label, on, change) => {
  const button = el("button", { type: "button", "aria-pressed": String(on), onclick: () => { on = !on; button.setAttribute("aria-pressed", String(on)); change(on); } }, label);
  return button;
};
const legend = (entries) => el("ul", { class: "legend" }, entries.map(([mark, text]) => el("li", {}, mark, text)));
const swatch = (colour, mark) => sv("svg", { width: 16, height: 14, "aria-hidden": "true" }, sv("rect", { width: 16, height: 14, rx: 3, style: `fill:var(${colour})` }),
  mark && sv("text", { x: 8, y: 11, "text-anchor": "middle", style: "fill:var(--on-colour);font-size:10px;font-weight:600" }, mark));
const tip = document.getElementById("tip");
const showTip = (text, x, y) => {
  tip.textContent = text; tip.classList.add("on");
  const bounds = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - bounds.width - 8))}px`;
  tip.style.top = `${y + 18 + bounds.height > innerHeight ? Math.max(6, y - bounds.height - 12) : y + 18}px`;
};
const hideTip = () => tip.classList.remove("on");
addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
// Round numbers for an axis: 1, 2 or 5 times a power of ten.
const ticks = (low, high, count) => {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => power * factor >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
};
const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let scope = "";
const redraws = new Map();
const onResize = (node, draw) => {
  let width = 0;
  new ResizeObserver(() => { const now = Math.floor(node.clientWidth); if (now && now !== width) { width = now; requestAnimationFrame(() => draw(now)); } }).observe(node);
  redraws.set(scope, () => width && draw(width));
};
const redrawAll = () => redraws.forEach((draw) => draw());
const storage = { get: () => { try { return localStorage.getItem("cuboid-theme"); } catch { return null; } }, set: (value) => { try { localStorage.setItem("cuboid-theme", value); } catch { /* a page of its own keeps nothing */ } } };
const themes = ["auto", "light", "dark"];
const setTheme = (name) => {
  if (name === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = name;
  const button = document.getElementById("theme");
  button.textContent = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[name];
  button.setAttribute("aria-label", `Theme: ${name}; press to change`);
  button.dataset.theme = name; storage.set(name); redrawAll();
};
document.getElementById("theme").addEventListener("click", (event) => setTheme(themes[(themes.indexOf(event.currentTarget.dataset.theme) + 1) % 3]));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
// An ordered, colour-blind safe ramp (after viridis) for what has more values than a palette has colours.
const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const ramp = (index, count) => {
  const at = count > 1 ? index / (count - 1) * 3.6 + 0.4 : 1.6, low = Math.min(3, Math.floor(at)), part = at - low;
  const [red, green, blue] = RAMP[low].map((value, channel) => Math.round(value + (RAMP[low + 1][channel] - value) * part));
  return { fill: `rgb(${red} ${green} ${blue})`, ink: 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#111" : "#fff" };
};
