const SECTIONS = [["summary", "Summary", drawSummary], ["curves", "Over time", drawCurves], ["timeline", "Timeline", drawTimeline], ["ranks", "Ranks", drawRanks], ["memory", "Memory", drawMemory], ["communication", "Communication", drawCommunication], ["considered", "Layouts", drawConsidered], ["explorer", "Explore", drawExplorer]];
function render(data) {
  redraws.clear();
  const main = document.getElementById("main"), contents = document.getElementById("contents"), made = [];
  for (const [id, name, draw] of SECTIONS) { const node = draw(data); if (node) made.push([id, name, node]); }
  const what = data.kind === "plan" ? "Plan" : `Run ${data.folder}`;
  main.replaceChildren(el("h1", {}, `${data.summary.model.name} on ${data.summary.cluster?.name ?? words(data.summary.ranks, "rank")}`), el("p", { class: "sub" }, `${what} · `, el("code", {}, data.summary.layout), ` · ${data.made.replace("T", " ").replace("+00:00", " UTC")} · Cuboid ${data.version}`), ...made.map(([, , node]) => node));
  contents.replaceChildren(...made.map(([id, name]) => el("a", { href: `#${id}` }, name)));
  document.documentElement.dataset.ready = "true";
}
setTheme(storage.get() || "auto");
render(JSON.parse(document.getElementById("data").textContent));
