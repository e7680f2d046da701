const DIMENSION_WORDS = { ...KIND_WORDS, kv: "replicated key-value heads", sequence: "sequence", world: "all ranks", expert_data: "experts’ data", expert_shard: "experts’ shards", expert_replicate: "experts’ replicas" };
function drawCommunication(data) {
  const info = data.communication;
  if (!info) return null;
  const most = Math.max(...info.lines.flatMap((line) => [line.bytes || 0, line.counted || 0]), 1);
  const bar = (value, colour) => el("i", { style: `display:inline-block;height:11px;border-radius:3px;background:var(${colour});width:${Math.max(100 * value / most, 0.5)}%` });
  const counted = info.lines.some((line) => line.counted !== null && line.counted !== undefined);
  const tiers = [...new Set(info.lines.map((line) => line.tier || "link not known"))];
  const shown = [...info.lines].sort((a, b) => tiers.indexOf(a.tier || "link not known") - tiers.indexOf(b.tier || "link not known") || (b.bytes || b.counted || 0) - (a.bytes || a.counted || 0));
  const rows = shown.map((line) => [
    DIMENSION_WORDS[line.dimension] ? `${DIMENSION_WORDS[line.dimension]} (${line.dimension})` : line.dimension,
    line.carries || "", line.tier ? `${line.tier}, ${figures(line.bandwidth)} GB/s` : "–",
    el("div", { style: "min-width:120px" }, line.bytes !== undefined ? bar(line.bytes, "--c0") : null, counted && line.counted ? el("div", { style: "line-height:1" }, bar(line.counted, "--c4")) : null),
    bytes(line.bytes), ...(counted ? [bytes(line.counted)] : []), line.seconds === undefined ? "–" : seconds(line.seconds),
  ]);
  const sums = tiers.map((tier) => { const lines = info.lines.filter((line) => (line.tier || "link not known") === tier); return `${tier}: ${bytes(lines.reduce((sum, line) => sum + (line.bytes ?? line.counted ?? 0), 0))}`; });
  const formulas = shown.filter((line) => line.formulas?.length);
  return section("communication", "Communication", `What the busiest rank of each dimension sends in one step, by the ring algorithm, and how long its slowest link would need at the printed bandwidth. By link: ${sums.join("; ")}.`,
    table(["dimension", "what travels", "slowest link", "", { label: "predicted", number: true }, ...(counted ? [{ label: "counted", number: true }] : []), { label: "link time", number: true }], rows),
    counted ? legend([[swatch("--c0", "P"), "upper bar: predicted"], [swatch("--c4", "C"), "lower bar: counted by the run"]]) : null,
    counted ? el("p", { class: `note ${info.unforeseen.length ? "warn" : "good"}` }, info.unforeseen.length ? `⚠ ${words(info.unforeseen.length, "collective")} not as predicted: ${info.unforeseen.slice(0, 5).join("; ")}` : `✓ Counted as predicted, to the byte, on ${words(info.counted_ranks, "rank")}.`) : data.kind === "run" ? el("p", { class: "note" }, "Not counted; train with --count-communication to see it beside the prediction.") : null,
    formulas.length ? el("details", {}, el("summary", {}, "Formulas"), formulas.map((line) => [el("p", { class: "note" }, el("strong", {}, line.dimension)), el("ul", {}, line.formulas.map((text) => el("li", {}, text)))])) : null);
}
