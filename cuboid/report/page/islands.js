// Each island: where it is, how large the outer gradient was, how far islands are apart.
function drawIslands(data) {
  const info = data.islands;
  if (!info) return null;
  const number = (label) => ({ label, number: true }), told = (value) => value === null ? "–" : figures(value, 3);
  return section("islands", "Islands", "As of the newest round that each has told of. Lag: steps behind the first of them. Skipped: steps that others took without it, of the latest rows. Apart: root of the mean square distance of islands from their mean.",
    table([number("island"), number("step"), number("lag"), number("skipped"), number("round"), number("islands in it"), number("outer gradient"), number("apart"), number("waited")],
      info.map((each) => [...[each.island, each.step, each.lag, each.skipped, each.round, each.islands].map((value) => value.toLocaleString("en")), told(each.outer_gradient_norm), told(each.drift), each.waited === null ? "–" : seconds(each.waited)])));
}
