// Knobs over a table computed ahead by the planner's cost model.
function drawExplorer(data) {
  const info = data.explorer;
  if (!info) return null;
  const unpack = (text, Kind) => { const raw = atob(text), buffer = new Uint8Array(raw.length); for (let index = 0; index < raw.length; index += 1) buffer[index] = raw.charCodeAt(index); return new Kind(buffer.buffer); };
  const keys = unpack(info.keys, Uint32Array), time = unpack(info.seconds, Float32Array), memory = unpack(info.memory, Float32Array), bubble = unpack(info.bubble, Float32Array);
  const names = Object.keys(info.axes), sizes = names.map((name) => info.axes[name].length), position = new Map();
  keys.forEach((key, index) => position.set(key, index));
  const keyOf = (indices) => indices.reduce((key, index, axis) => key * sizes[axis] + index, 0);
  const indicesOf = (key) => { const found = []; for (let axis = sizes.length - 1; axis >= 0; axis -= 1) { found.unshift(key % sizes[axis]); key = Math.floor(key / sizes[axis]); } return found; };
  // The row that keeps the knob just moved and moves the others least; the cheaper where several are as near.
  const nearest = (wanted, fixed) => {
    let best = null, least = Infinity;
    keys.forEach((key, index) => {
      const found = indicesOf(key); if (fixed !== null && found[fixed] !== wanted[fixed]) return;
      const far = found.reduce((sum, value, axis) => sum + (value === wanted[axis] ? 0 : 4 + Math.abs(value - wanted[axis])), 0) + time[index] / 1e9;
      if (far < least) { least = far; best = found; }
    });
    return best;
  };
  const wanted = names.map((name) => Math.max(0, info.axes[name].findIndex((value) => value === info.own[name])));
  let now = position.has(keyOf(wanted)) ? wanted : nearest(wanted, null);
  const start = position.get(keyOf(now)), menus = [], out = el("div", {}), said = el("p", { class: "note", "aria-live": "polite" });
  const labels = { tp: "tensor (tp)", pp: "pipeline (pp)", micro_batch: "micro-batch", zero: "ZeRO", recompute: "recompute", schedule: "schedule" };
  const change = (value, base) => { const part = value / base - 1; return Math.abs(part) < 0.0005 ? "as planned" : `${part > 0 ? "+" : "−"}${percent(Math.abs(part))} against the plan`; };
  const show = () => {
    const row = position.get(keyOf(now)), value = Object.fromEntries(names.map((name, axis) => [name, info.axes[name][now[axis]]])), dp = info.world_size / (value.tp * value.pp * info.cp);
    const over = memory[row] > info.limit, fraction = memory[row] / info.capacity;
    menus.forEach((menu, axis) => { menu.value = String(now[axis]); });
    out.replaceChildren(el("dl", { class: "facts" }, fact("Step time", seconds(time[row]), change(time[row], time[start])), fact("Fullest rank", bytes(memory[row]), `${percent(fraction, 0)} of ${bytes(info.capacity)}${over ? ": does not fit" : ""}`), fact("Bubble", percent(bubble[row]), "of the step"), fact("Replicas (dp)", String(dp), `${words(info.global_batch / dp / value.micro_batch, "micro-batch").replace("batchs", "batches")} each`)),
      el("div", { class: "bars" }, el("div", {}, el("b", {}, "time"), el("i", { style: `width:${Math.min(100, 50 * time[row] / time[start])}%` }), el("span", {}, seconds(time[row]))), el("div", {}, el("b", {}, `memory${over ? " ⚠ over the limit" : ""}`), el("i", { style: `width:${Math.min(100, 100 * fraction)}%;background:var(${over ? "--c1" : "--c2"})` }), el("span", {}, bytes(memory[row])))));
  };
  const move = (axis, index) => {
    const asked = now.map((value, other) => other === axis ? index : value), before = now;
    now = position.has(keyOf(asked)) ? asked : nearest(asked, axis) || now;
    const moved = names.filter((_, other) => other !== axis && now[other] !== before[other]).map((name) => `${labels[name]} ${info.axes[name][now[names.indexOf(name)]]}`);
    said.textContent = moved.length ? `No such layout of this model, batch and cluster; the nearest has ${moved.join(", ")}.` : "";
    show();
  };
  const knobs = names.map((name, axis) => { const menu = el("select", { onchange: () => move(axis, Number(menu.value)) }, info.axes[name].map((value, index) => el("option", { value: index }, String(value)))); menus.push(menu); return el("label", {}, labels[name], menu); });
  show();
  return section("explorer", "Change the plan", `Turn a knob: memory, time and bubble follow, from the planner’s cost model in closed form (${info.rows.toLocaleString("en")} layouts, computed ahead). cuboid plan simulates the best of them.`,
    el("div", { class: "explorer" }, knobs), out, said, el("button", { type: "button", onclick: () => { now = indicesOf(keys[start]); said.textContent = ""; show(); } }, "Back to the plan"));
}
