const fact = (name, value, small) => value === null || value === undefined || value === "–" ? null : el("div", { class: "fact" }, el("dt", {}, name), el("dd", {}, value, small && el("small", {}, small)));
const beside = (measured, predicted, format) => [measured === null || measured === undefined ? null : format(measured), predicted === null || predicted === undefined ? null : `predicted ${format(predicted)}`];
function drawSummary(data) {
  const { model, training, cluster, predicted, measured } = data.summary;
  const track = (id) => data.timeline.tracks.find((entry) => entry.id === id);
  const bubbles = [track("measured-typical")?.bubble, track("predicted")?.bubble ?? predicted?.bubble];
  const pair = (name, now, then, format) => {
    const [first, second] = beside(now, then, format);
    return first ? fact(name, first, second) : fact(name, then === null || then === undefined ? null : format(then), "predicted");
  };
  const per = (value) => value && value / data.summary.ranks;
  const facts = [
    fact("Model", model.name, `${amount(model.parameters)} parameters, ${model.layers} layers of ${model.hidden.toLocaleString("en")}`),
    cluster ? fact("Cluster", cluster.name, `${words(cluster.nodes, "node")} of ${cluster.per_node}, ${figures(cluster.memory_gib)} GiB each${cluster.planned ? "" : "; assumed"}`) : fact("Ranks", String(data.summary.ranks), "cluster not known"),
    fact("Step", `${amount(training.tokens_per_step)} tokens`, `${training.global_batch.toLocaleString("en")} × ${training.sequence.toLocaleString("en")}, ${words(training.micro_batches, "micro-batch").replace("batchs", "batches")} a replica, ${training.precision}`),
    measured && fact("Progress", `${measured.steps.toLocaleString("en")} / ${training.steps.toLocaleString("en")} steps`, `${amount(measured.tokens)} tokens`),
    measured && fact("Loss", figures(measured.last_loss, 4), `from ${figures(measured.first_loss, 4)}`),
    pair("Step time", measured?.step_seconds, predicted?.step_seconds, seconds),
    pair("Throughput", measured?.tokens_per_second, predicted?.tokens_per_second, (value) => `${amount(value)} tokens/s`),
    predicted || measured ? fact("Per rank", `${figures(per(measured?.tokens_per_second ?? predicted?.tokens_per_second))} tokens/s`) : null,
    pair("MFU", measured?.mfu, predicted?.mfu, percent),
    pair("Bubble", bubbles[0], bubbles[1], percent),
    pair("Fullest rank", measured?.memory_gib, predicted?.memory_gib, (value) => `${figures(value)} GiB`),
    data.summary.goodput ? fact("Goodput", percent(data.summary.goodput.fraction), Object.entries(data.summary.goodput.spent).filter(([, value]) => value >= 0.05).slice(0, 3).map(([name, value]) => `${name.replaceAll("_", " ")} ${seconds(value)}`).join(", ")) : null,
  ];
  const parts = predicted && Object.entries(predicted.parts).filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
  const longest = parts && Math.max(...parts.map(([, value]) => value));
  return section("summary", "Summary", null, el("dl", { class: "facts" }, facts),
    data.summary.warnings.map((text) => el("p", { class: "note warn" }, `⚠ ${text}`)),
    predicted?.warnings.map((text) => el("p", { class: "note warn" }, `⚠ ${text}`)),
    parts && el("h3", { style: "font-size:.98rem;margin:.4rem 0 .5rem" }, "Where the predicted step time goes"),
    parts && el("div", { class: "bars" }, parts.map(([name, value]) => el("div", {}, el("b", {}, predicted.words[name]), el("i", { style: `width:${100 * value / longest}%` }), el("span", {}, `${seconds(value)} · ${percent(value / predicted.step_seconds)}`)))),
    predicted?.reasons.length ? el("details", {}, el("summary", {}, "Why this layout"), el("ul", {}, predicted.reasons.map((text) => el("li", {}, text)))) : null);
}
