// The cuboid: ranks on nodes. Above a few thousand a cell stands for several ranks.
const KIND_WORDS = { tp: "tensor", cp: "context", ep: "expert", pp: "pipeline", data: "data", shard: "shard of ZeRO", replicate: "replica of shards", embedding: "tied embedding" };
const MOST_CELLS = 2048;
function drawRanks(data) {
  const info = data.ranks, { degrees, world_size: world } = info;
  const place = (rank) => {
    const tp = rank % degrees.tp, cp = Math.floor(rank / degrees.tp) % degrees.cp, above = Math.floor(rank / (degrees.tp * degrees.cp));
    return { tp, cp, dp: above % degrees.dp, pp: Math.floor(above / degrees.dp), ep: rank % degrees.ep };
  };
  const groupOf = (rank, kind) => {
    const { stride, size } = info.groups[kind], first = rank - Math.floor(rank / stride) % size * stride;
    return Array.from({ length: size }, (_, index) => first + index * stride);
  };
  const tierOf = (ranks) => info.tiers.find((tier) => new Set(ranks.map((rank) => Math.floor(rank / tier.size))).size <= 1);
  const each = Math.max(1, 2 ** Math.ceil(Math.log2(world / MOST_CELLS))), cells = Math.ceil(world / each);
  const perNode = info.per_node, nodes = Math.ceil(world / perNode);
  const dimensions = ["pp", "dp", "tp", "cp", "ep"].filter((name) => degrees[name] > 1);
  let colour = dimensions[0] || "pp";
  const size = cells <= 64 ? 34 : cells <= 256 ? 24 : cells <= 1024 ? 15 : 12;
  const buttons = [];
  const panel = el("div", { class: "panel", "aria-live": "polite" }, `Point at a rank, or move with the arrow keys, to see its groups and the links they cross.`);
  // Beside the outline a letter says by which group a rank belongs to the one looked at.
  const paint = (members, self) => buttons.forEach((button, index) => {
    const at = place(button.rank), shade = ramp(at[colour], degrees[colour]);
    button.style.background = shade.fill; button.style.color = shade.ink;
    const number = size >= 24 && each === 1 ? String(button.rank) : "", letter = button !== self && members?.get(index) || "";
    button.textContent = size >= 34 || !letter ? `${number}${letter && ` ${letter}`}`.trim() : letter;
  });
  const show = (button) => {
    const rank = button.rank, at = place(rank), kinds = Object.keys(info.groups), members = new Map();
    const rows = kinds.map((kind) => {
      const ranks = groupOf(rank, kind), tier = tierOf(kind === "pp" ? ranks.slice(Math.max(0, at.pp - 1), at.pp + 2) : ranks), line = info.traffic.find((entry) => entry.kind === kind);
      ranks.forEach((member) => { const cell = Math.floor(member / each); if (!members.has(cell)) members.set(cell, (KIND_WORDS[kind] || kind)[0].toUpperCase()); });
      const shown = ranks.length > 10 ? `${ranks.slice(0, 4).join(" ")} … ${ranks.at(-1)}` : ranks.join(" ");
      return [`${KIND_WORDS[kind] || kind} (${(KIND_WORDS[kind] || kind)[0].toUpperCase()})`, String(ranks.length), shown, tier ? `${tier.name}, ${figures(tier.bandwidth)} GB/s` : "–", line ? line.carries : ""];
    });
    const stages = info.stages_of[at.pp].join(" and "), where = dimensions.map((name) => `${name} ${at[name]}`).join(", ");
    panel.replaceChildren(el("p", {}, el("strong", {}, each > 1 ? `Ranks ${rank} to ${Math.min(rank + each, world) - 1}` : `Rank ${rank}`), ` on node ${Math.floor(rank / perNode)}${where ? `: ${where}` : ""}; stage${info.stages_of[at.pp].length > 1 ? "s" : ""} ${stages}`),
      rows.length ? table(["group", { label: "ranks", number: true }, "members", "slowest link", "what travels"], rows) : el("p", {}, "One rank: nothing travels."));
    paint(members, button);
    buttons.forEach((other, index) => { other.classList.toggle("self", other === button); other.classList.toggle("in", other !== button && members.has(index)); other.classList.toggle("dim", other !== button && !members.has(index)); });
  };
  const clear = () => { paint(); buttons.forEach((button) => button.classList.remove("self", "in", "dim")); };
  const columns = perNode / each <= 4 ? Math.max(1, perNode / each) : nodes > 4 ? 4 : 8;
  const move = (event, index) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, PageDown: Math.max(1, perNode / each), PageUp: -Math.max(1, perNode / each), Home: -index, End: buttons.length - 1 - index }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const next = buttons[Math.max(0, Math.min(buttons.length - 1, index + step))];
    buttons[index].tabIndex = -1; next.tabIndex = 0; next.focus();
  };
  const grid = el("div", { class: "nodes", role: "group", "aria-label": `${world} ranks on ${words(nodes, "node")}`, onmouseleave: clear });
  const perBlock = Math.max(1, Math.round(perNode / each)), blocks = Math.ceil(cells / perBlock);
  for (let block = 0; block < blocks; block += 1) {
    const holder = el("div", { class: "cells", style: `grid-template-columns:repeat(${Math.min(columns, perBlock)},${size}px)` });
    for (let cell = block * perBlock; cell < Math.min((block + 1) * perBlock, cells); cell += 1) {
      const button = el("button", { type: "button", class: "rank", style: `width:${size}px;height:${size}px`, tabindex: cell ? -1 : 0, "aria-label": `rank ${cell * each}`, onmouseenter: () => show(button), onfocus: () => show(button), onclick: () => show(button), onkeydown: (event) => move(event, cell) });
      button.rank = cell * each; buttons.push(button); holder.append(button);
    }
    const label = perNode >= each ? `node ${block}` : `nodes ${block * Math.round(each / perNode)}–${Math.min(nodes, (block + 1) * Math.round(each / perNode)) - 1}`;
    grid.append(el("div", { class: "node" }, cells <= 1024 ? el("span", {}, label) : null, holder));
  }
  paint();
  const key = el("div", {});
  const drawKey = () => {
    const count = degrees[colour], picks = count <= 8 ? [...Array(count).keys()] : [0, Math.floor(count / 3), Math.floor(2 * count / 3), count - 1];
    key.replaceChildren(legend(picks.map((index) => { const shade = ramp(index, count); return [sv("svg", { width: 26, height: 16, "aria-hidden": "true" }, sv("rect", { width: 26, height: 16, rx: 3, fill: shade.fill }), sv("text", { x: 13, y: 12, "text-anchor": "middle", style: `fill:${shade.ink};font-size:10px` }, index)), `${colour} ${index}`]; })));
  };
  drawKey();
  const names = { pp: "pipeline rank (pp)", dp: "replica (dp)", tp: "tensor rank (tp)", cp: "part of the sequence (cp)", ep: "expert rank (ep)" };
  const lead = `${words(world, "rank")}${info.tiers.length ? ` on ${words(nodes, "node")} of ${perNode}` : ""}${each > 1 ? `; each cell stands for ${each} ranks` : ""}.`;
  return section("ranks", "The cuboid", lead,
    dimensions.length ? el("div", { class: "controls" }, choice("Colour by", dimensions.map((name) => [name, names[name]]), colour, (value) => { colour = value; paint(); drawKey(); })) : null,
    el("div", { style: "max-height:790px;overflow:auto;padding:3px" }, grid), key, panel);
}
