// Asks the server that gave this page for newer data, and draws anew only the sections that changed.
let tag = null, failed = 0;
const mark = el("span", { class: "note", style: "margin:0;white-space:nowrap" }, "● live");
document.querySelector(".bar").insertBefore(mark, document.getElementById("theme"));
async function look() {
  try {
    const answer = await fetch("data.json", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
    if (answer.status === 200) { tag = answer.headers.get("ETag"); render(await answer.json()); }
    if (answer.status === 503) { failed += 1; mark.textContent = "○ " + (await answer.text()).trim(); }
    else { failed = 0; mark.textContent = "● live"; }
  } catch { failed += 1; mark.textContent = "○ not reached"; }
  setTimeout(look, failed ? Math.min(30000, 3000 * failed) : 3000);
}
setTimeout(look, 3000);
