const SECTIONS = [["summary", "Summary", drawSummary], ["curves", "Over time", drawCurves], ["layers", "By layer", drawLayers], ["experts", "Experts", drawExperts], ["islands", "Islands", drawIslands], ["rank_time", "Who waits", drawRankTime], ["timeline", "Timeline", drawTimeline], ["ranks", "Ranks", drawRanks], ["memory", "Memory", drawMemory], ["communication", "Communication", drawCommunication], ["considered", "Layouts", drawConsidered], ["explorer", "Explore", drawExplorer]];
const drawn = new Map();
function render(data) {
  for (const [id, name, draw] of SECTIONS) {
    const seen = JSON.stringify([data[id], id === "summary" && data.timeline]);
    const old = drawn.get(id);
    if (old && (old.seen === seen || old.node?.contains(document.activeElement))) continue; // whoever works in it is not disturbed
    redraws.delete(id); scope = id;
    drawn.set(id, { seen, name, node: draw(data) });
  }
  const main = document.getElementById("main"), contents = document.getElementById("contents");
  const made = [...drawn].filter(([, entry]) => entry.node).map(([id, entry]) => [id, entry.name, entry.node]);
  const what = data.kind === "plan" ? "Plan" : `Run ${data.folder}`;
  const heading = [el("h1", {}, `${data.summary.model.name} on ${data.summary.cluster?.name ?? words(data.summary.ranks, "rank")}`), el("p", { class: "sub" }, `${what} · `, el("code", {}, data.summary.layout), ` · ${data.made.replace("T", " ").replace("+00:00", " UTC")} · Cuboid ${data.version}`)];
  const wanted = made.map(([, , node]) => node), standing = [...main.querySelectorAll("section.card")];
  // What has not changed stays where it is, with its zoom and its focus.
  if (standing.length !== wanted.length) main.replaceChildren(...heading, ...wanted);
  else { wanted.forEach((node, index) => { if (standing[index] !== node) standing[index].replaceWith(node); }); main.querySelectorAll("h1, .sub").forEach((node) => node.remove()); main.prepend(...heading); }
  contents.replaceChildren(...made.map(([id, name]) => el("a", { href: `#${id}` }, name)));
  document.documentElement.dataset.ready = "true";
}
setTheme(storage.get() || "auto");
render(JSON.parse(document.getElementById("data").textContent));
