// The pipeline on one time axis: predicted above, measured below. Wheel, pinch, drag and keys zoom and pan.
const KIND_NAMES = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
const KIND_COLOURS = { F: "--forward", B: "--backward", I: "--input", W: "--weight" };
const LANE = 26, LANE_GAP = 3, TITLE = 24, AXIS = 26, LEFT = 62;
function drawTimeline(data) {
  const info = data.timeline, { tick, kinds } = info;
  const tracks = info.tracks.map((track) => ({ ...track, ends: track.lanes.map((lane) => lane.events.at(-1) || 0) }));
  if (!tracks.length) return null;
  const measured = tracks.filter((track) => track.id.startsWith("measured")), planned = tracks.find((track) => track.id === "predicted"), replayed = tracks.find((track) => track.id === "replayed");
  let above = planned || replayed, below = measured[0], stretch = false, arrows = false, picked = null;
  const spanOf = (track) => Math.max(...track.lanes.map((lane) => { let last = 0; for (let at = 5; at < lane.events.length; at += 6) last = Math.max(last, lane.events[at]); return last; })) * tick;
  tracks.forEach((track) => { track.span = spanOf(track); });
  // Where the planner is far off, what it foresaw is a sliver on the same axis: begin with the simulation of measured times.
  if (below && replayed && above && Math.max(above.span / below.span, below.span / above.span) > 3) above = replayed;
  const shown = () => [above, below].filter(Boolean);
  const whole = () => stretch ? 1 : Math.max(...shown().map((track) => track.span));
  let view = [0, whole()];
  const canvas = el("canvas", { class: "chart", tabindex: 0, role: "application", "aria-label": "Pipeline timeline. Left and right arrows walk along the actions, up and down change the lane, plus and minus zoom, 0 shows all." });
  const said = el("div", { class: "panel", "aria-live": "polite" }, "Point at an action, or walk with the arrow keys; + and − zoom, 0 shows all, Shift with an arrow pans.");
  let width = 0, bars = [];
  const heightOf = (track) => TITLE + track.lanes.length * (LANE + LANE_GAP) + 8;
  const draw = (now) => {
    width = now; [canvas.dataset.from, canvas.dataset.to] = view;
    const height = shown().reduce((sum, track) => sum + heightOf(track), 0) + AXIS, ratio = devicePixelRatio || 1;
    canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d"); pen.scale(ratio, ratio);
    const ink = colourOf("--ink"), soft = colourOf("--soft"), line = colourOf("--line"), faint = colourOf("--faint"), on = colourOf("--on-colour"), wait = colourOf("--wait");
    const colours = kinds.map((kind) => colourOf(KIND_COLOURS[kind]));
    const inner = width - LEFT - 6, [low, high] = view, x = (at) => LEFT + (at - low) / (high - low) * inner;
    const font = getComputedStyle(document.body).fontFamily;
    pen.clearRect(0, 0, width, height); bars = [];
    const unit = stretch ? (at) => percent(at, 0) : (at) => seconds(at, 4);
    pen.font = `11px ${font}`; pen.textAlign = "center";
    for (const at of ticks(low, high, Math.max(2, Math.floor(inner / 110)))) {
      pen.fillStyle = line; pen.fillRect(Math.round(x(at)), 0, 1, height - AXIS + 4);
      pen.fillStyle = soft; pen.fillText(unit(at), Math.min(Math.max(x(at), LEFT + 12), width - 24), height - 8);
    }
    let top = 0;
    for (const track of shown()) {
      const scale = stretch ? tick / track.span : tick;
      pen.fillStyle = ink; pen.font = `600 12px ${font}`; pen.textAlign = "left";
      const title = `${seconds(track.seconds)}, bubble ${percent(track.bubble)}: ${track.label}`;
      let cut = title; while (cut.length > 8 && pen.measureText(cut).width > width - 8) cut = `${cut.slice(0, -2)}…`;
      pen.fillStyle = colourOf("--card"); pen.fillRect(0, top, Math.min(width, pen.measureText(cut).width + 8), TITLE - 3);
      pen.fillStyle = ink; pen.fillText(cut, 0, top + 15);
      track.lanes.forEach((lane, index) => {
        const y = top + TITLE + index * (LANE + LANE_GAP);
        pen.fillStyle = faint; pen.fillRect(LEFT, y, inner, LANE);
        pen.save(); pen.beginPath(); pen.rect(LEFT, y, inner, LANE); pen.clip();
        for (let at = 0; at < lane.events.length; at += 6) {
          const [kind, stage, batch, start, ready, end] = lane.events.slice(at, at + 6), from = x(ready * scale), to = x(end * scale);
          if (to < LEFT || x(start * scale) > width) continue;
          bars.push({ track, lane, index, at, from: x(start * scale), to, y });
          if (ready > start) {
            pen.fillStyle = wait; const begin = x(start * scale); pen.globalAlpha = 0.55; pen.fillRect(begin, y + LANE / 2 - 2, from - begin, 4); pen.globalAlpha = 1;
          }
          const chunk = info.stage_rank.slice(0, stage).filter((holder) => holder === info.stage_rank[stage]).length;
          pen.globalAlpha = chunk % 2 ? 0.62 : 1; pen.fillStyle = colours[kind];
          const wide = Math.max(to - from - (to - from > 4 ? 0.8 : 0), 0.6);
          // Weight gradients fill the lower part, input gradients the upper: shape tells them apart as well as colour.
          const [offset, tall] = { W: [LANE * 0.3, LANE * 0.7], I: [0, LANE * 0.7] }[kinds[kind]] || [0, LANE];
          pen.fillRect(from, y + offset, wide, tall); pen.globalAlpha = 1;
          if (kinds[kind] === "B" && wide > 3) { pen.fillStyle = on; pen.globalAlpha = 0.45; pen.fillRect(from, y + LANE - 4, wide, 2); pen.globalAlpha = 1; }
          const label = wide > 40 ? `${kinds[kind]}${batch}` : String(batch);
          pen.font = `600 11px ${font}`; pen.textAlign = "center";
          if (wide > pen.measureText(label).width + 4) { pen.fillStyle = chunk % 2 ? ink : on; pen.fillText(label, from + wide / 2, y + offset + tall / 2 + 4); }
        }
        pen.restore();
        pen.fillStyle = soft; pen.font = `11px ${font}`; pen.textAlign = "right"; pen.fillText(`rank ${lane.rank}`, LEFT - 8, y + LANE / 2 + 4);
      });
      if (arrows) drawMessages(pen, track, scale, x, top, ink);
      top += heightOf(track);
    }
    if (picked) {
      const bar = bars.find((entry) => entry.track.id === picked.track.id && entry.index === picked.index && entry.at === picked.at);
      if (bar) { pen.strokeStyle = ink; pen.lineWidth = 2; pen.strokeRect(Math.max(bar.from, LEFT), bar.y - 1, Math.max(bar.to - Math.max(bar.from, LEFT), 2), LANE + 2); }
    }
  };
  const drawMessages = (pen, track, scale, x, top, ink) => {
    const ended = new Map();
    track.lanes.forEach((lane, index) => { for (let at = 0; at < lane.events.length; at += 6) { const [kind, stage, batch, , , end] = lane.events.slice(at, at + 6); if (kinds[kind] !== "W") ended.set(`${kinds[kind] === "F"}${stage}.${batch}`, [index, end]); } });
    pen.save(); pen.beginPath(); pen.rect(LEFT, top, width - LEFT, heightOf(track)); pen.clip(); pen.strokeStyle = ink; pen.globalAlpha = 0.4; pen.lineWidth = 1;
    track.lanes.forEach((lane, index) => { for (let at = 0; at < lane.events.length; at += 6) {
      const [kind, stage, batch, , ready] = lane.events.slice(at, at + 6); if (kinds[kind] === "W") continue;
      const forward = kinds[kind] === "F", source = ended.get(`${forward}${forward ? stage - 1 : stage + 1}.${batch}`);
      if (!source || source[0] === index) continue;
      const middle = (lane_index) => top + TITLE + lane_index * (LANE + LANE_GAP) + LANE / 2;
      pen.beginPath(); pen.moveTo(x(source[1] * scale), middle(source[0])); pen.lineTo(x(ready * scale), middle(index)); pen.stroke();
    } });
    pen.restore();
  };
  const tell = (bar) => {
    const [kind, stage, batch, start, ready, end] = bar.lane.events.slice(bar.at, bar.at + 6);
    const waited = (ready - start) * tick;
    return `${KIND_NAMES[kinds[kind]]} of micro-batch ${batch} on stage ${stage}, rank ${bar.lane.rank}\n${seconds((end - ready) * tick)} of work from ${seconds(ready * tick, 5)} to ${seconds(end * tick, 5)}${waited > 0 ? `\nwaited ${seconds(waited)} for its input` : ""}`;
  };
  const pick = (bar) => { picked = bar; said.textContent = `${bar.track.label}: ${tell(bar).replaceAll("\n", "; ")}`; };
  const clamp = (low, high) => { const full = whole(), size = Math.min(Math.max(high - low, full / 5000), full); low = Math.max(0, Math.min(low, full - size)); view = [low, low + size]; draw(width); };
  const zoom = (factor, at = (view[0] + view[1]) / 2) => clamp(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
  const timeAt = (event) => view[0] + (event.clientX - canvas.getBoundingClientRect().left - LEFT) / (width - LEFT - 6) * (view[1] - view[0]);
  const barAt = (event) => { const area = canvas.getBoundingClientRect(), px = event.clientX - area.left, py = event.clientY - area.top; return px < LEFT ? null : bars.find((bar) => py >= bar.y && py <= bar.y + LANE && px >= bar.from && px <= Math.max(bar.to, bar.from + 2)); };
  canvas.addEventListener("wheel", (event) => { if (!event.ctrlKey && !event.shiftKey && document.activeElement !== canvas) return; event.preventDefault(); if (event.shiftKey) clamp(view[0] + event.deltaY / 500 * (view[1] - view[0]), view[1] + event.deltaY / 500 * (view[1] - view[0])); else zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, timeAt(event)); }, { passive: false });
  let drag = null;
  // Two fingers: the moments under them stay under them.
  const fingers = new Map();
  const pinch = () => { const [[a, b], area] = [[...fingers.values()], canvas.getBoundingClientRect()]; if (Math.abs(b.x - a.x) < 8) return; const scale = (b.at - a.at) / (b.x - a.x); if (scale > 0) { const low = a.at - (a.x - area.left - LEFT) * scale; clamp(low, low + (width - LEFT - 6) * scale); } };
  canvas.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, view: [...view], moved: false }; fingers.set(event.pointerId, { x: event.clientX, at: timeAt(event) }); canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (fingers.has(event.pointerId)) fingers.get(event.pointerId).x = event.clientX;
    if (fingers.size === 2) { drag = null; hideTip(); pinch(); return; }
    if (drag && event.buttons) { const shift = (drag.x - event.clientX) / (width - LEFT - 6) * (drag.view[1] - drag.view[0]); if (Math.abs(drag.x - event.clientX) > 3) { drag.moved = true; hideTip(); clamp(drag.view[0] + shift, drag.view[1] + shift); } return; }
    const bar = barAt(event); if (bar) showTip(tell(bar), event.clientX, event.clientY); else hideTip();
  });
  canvas.addEventListener("pointerup", (event) => { if (drag && !drag.moved) { const bar = barAt(event); if (bar) { pick(bar); draw(width); } } drag = null; fingers.delete(event.pointerId); });
  canvas.addEventListener("pointercancel", (event) => { drag = null; fingers.delete(event.pointerId); });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("keydown", (event) => {
    const size = view[1] - view[0], lanes = shown().flatMap((track) => track.lanes.map((lane, index) => ({ track, lane, index })));
    const go = (entry, at) => { const scale = stretch ? tick / entry.track.span : tick, [, , , start, , end] = entry.lane.events.slice(at, at + 6); pick({ ...entry, at }); const from = start * scale, to = end * scale; if (from < view[0] || to > view[1]) clamp((from + to) / 2 - size / 2, (from + to) / 2 + size / 2); else draw(width); };
    const here = picked && lanes.findIndex((entry) => entry.track === picked.track && entry.index === picked.index);
    const actions = {
      "+": () => zoom(1 / 1.4), "=": () => zoom(1 / 1.4), "-": () => zoom(1.4), 0: () => clamp(0, whole()),
      ArrowRight: () => event.shiftKey ? clamp(view[0] + size / 8, view[1] + size / 8) : picked && here >= 0 ? go(lanes[here], Math.min(picked.at + 6, lanes[here].lane.events.length - 6)) : go(lanes[0], 0),
      ArrowLeft: () => event.shiftKey ? clamp(view[0] - size / 8, view[1] - size / 8) : picked && here >= 0 ? go(lanes[here], Math.max(picked.at - 6, 0)) : go(lanes[0], 0),
      ArrowDown: () => go(lanes[Math.min((here ?? -1) + 1, lanes.length - 1)], 0), ArrowUp: () => go(lanes[Math.max((here ?? 1) - 1, 0)], 0),
    };
    if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
  });
  onResize(canvas, draw);
  const reset = () => { picked = null; view = [0, whole()]; draw(width); };
  const truth = [];
  if (below) {
    if (replayed) truth.push(`The schedule, simulated with the times its stages really took, has a bubble of ${percent(replayed.bubble)}; measured in the same step: ${percent(measured[0].bubble)}${measured[0].bubble ? `, so the simulation is off by ${percent(Math.abs(replayed.bubble / measured[0].bubble - 1), 0)}` : ""}.`);
    if (planned) truth.push(`The planner foresaw ${percent(planned.bubble)} and ${seconds(planned.seconds)} for the pipeline, which took ${seconds(measured[0].seconds)}.`);
    if (measured[0].hosts > 1) truth.push(measured[0].uncertain === null ? `Clocks of ${measured[0].hosts} hosts are aligned by the time of day alone.` : `Clocks of ${measured[0].hosts} hosts are aligned to ${seconds(measured[0].uncertain)}.`);
  }
  const used = kinds.filter((kind, index) => tracks.some((track) => track.lanes.some((lane) => { for (let at = 0; at < lane.events.length; at += 6) if (lane.events[at] === index) return true; return false; })));
  const tops = [planned, replayed].filter(Boolean);
  return section("timeline", "Pipeline timeline", `One step of ${info.schedule} with ${info.micro_batches} micro-batches: a lane per pipeline rank, numbers are micro-batches, what is blank is idle.`,
    el("div", { class: "controls" },
      tops.length > 1 && choice("Above", tops.map((track) => [track.id, track.label]), above?.id, (id) => { above = tracks.find((track) => track.id === id); reset(); }),
      measured.length > 1 && choice("Below", measured.map((track) => [track.id, track.label]), below?.id, (id) => { below = tracks.find((track) => track.id === id); reset(); }),
      el("button", { type: "button", onclick: () => zoom(1 / 1.6), "aria-label": "Zoom in" }, "+"), el("button", { type: "button", onclick: () => zoom(1.6), "aria-label": "Zoom out" }, "−"), el("button", { type: "button", onclick: () => clamp(0, whole()) }, "All"),
      tops.length && measured.length ? toggle("Same width", stretch, (on) => { stretch = on; reset(); }) : null,
      info.stage_rank.length > 1 ? toggle("Messages", arrows, (on) => { arrows = on; draw(width); }) : null),
    canvas,
    legend([...used.map((kind) => [swatch(KIND_COLOURS[kind], kind), KIND_NAMES[kind]]), [sv("svg", { width: 16, height: 14, "aria-hidden": "true" }, sv("rect", { y: 5, width: 16, height: 4, style: "fill:var(--wait)" })), "waiting for a message"], info.stage_rank.length > new Set(info.stage_rank).size ? [swatch("--c7"), "paler: every other stage of the rank"] : [null, ""]].filter(([mark]) => mark)),
    said, truth.map((text) => el("p", { class: "note" }, text)), notes(info.notes));
}
