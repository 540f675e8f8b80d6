"use strict";
for (const root of document.querySelectorAll(".pv")) {
  const data = JSON.parse(root.dataset.schedule);
  const { world, chunks, steps, columns, bytes } = data;
  const make = (name, parent, text, cls) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (cls) made.className = cls;
    parent.appendChild(made);
    return made;
  };
  const runs = function* (list) { for (const [a, b] of list) for (let c = a; c < b; c++) yield c; };
  // states[k]: what every slot holds after k steps, as the set of ranks whose inputs are in it
  const states = [Array.from({ length: world }, (_, r) => Array.from({ length: chunks }, () => new Set([r])))];
  for (const step of steps) {
    const before = states[states.length - 1];
    const after = before.map((row) => row.slice());
    for (const [src, dst, list, add] of step.moves)
      for (const c of runs(list)) after[dst][c] = add ? new Set([...after[dst][c], ...before[src][c]]) : before[src][c];
    states.push(after);
  }
  const size = (count) => {
    let value = (count / chunks) * bytes, unit = 0;
    while (value >= 1024 && unit < 4) { value /= 1024; unit++; }
    return (value < 10 && unit ? value.toFixed(1) : Math.round(value)) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
  };
  const bar = make("div", root, undefined, "bar");
  const play = make("button", bar, "Play");
  const slider = make("input", bar);
  Object.assign(slider, { type: "range", min: 0, max: steps.length, value: 0, step: 1 });
  slider.setAttribute("aria-label", "step");
  const back = make("button", bar, "‹"), next = make("button", bar, "›");
  back.setAttribute("aria-label", "previous step");
  next.setAttribute("aria-label", "next step");
  const words = make("p", root);
  words.setAttribute("aria-live", "polite");
  const stage = make("div", root, undefined, "stage");
  stage.style.marginTop = "10px";
  const grid = make("div", stage, undefined, "ranks");
  stage.classList.add(columns === 1 ? "lanes" : "grid");
  grid.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
  const arrows = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  arrows.setAttribute("class", "arrows");
  arrows.setAttribute("aria-hidden", "true");
  stage.appendChild(arrows);
  const cards = states[0].map((row, r) => {
    const card = make("div", grid, undefined, "rank");
    const head = make("b", card);
    make("span", head, "rank " + r).style.color = "var(--ink)";
    const sent = make("span", head, "");
    const strip = make("div", card, undefined, "chunks");
    return { card, sent, cells: row.map(() => make("i", strip)) };
  });
  const legend = make("div", root, undefined, "legend");
  for (const [colour, text] of [["var(--part)", "height: how many ranks' contributions have arrived"], ["var(--full)", "all contributions"]]) {
    const entry = make("span", legend);
    make("i", entry).style.background = colour;
    entry.append(text);
  }
  make("span", legend, "solid arrow: adds; dashed arrow: copies");
  const proof = make("div", root, undefined, "proof");
  const details = make("details", root);
  const summary = make("summary", details, "");
  const table = make("table", details);
  let at = 0, timer = null;
  const line = (from, to, add) => {
    const box = stage.getBoundingClientRect();
    const a = cards[from].card.getBoundingClientRect(), b = cards[to].card.getBoundingClientRect();
    const right = (r) => r.right - box.left, middle = (r) => r.left + r.width / 2 - box.left, centre = (r) => r.top + r.height / 2 - box.top;
    const top = (r) => r.top - box.top, bottom = (r) => r.bottom - box.top;
    let x1, y1, x2, y2, mx, my;
    if (columns === 1) { // lanes: around the right end of the cards
      [x1, y1, x2, y2] = [right(a), centre(a), right(b), centre(b)];
      mx = Math.max(x1, x2) + Math.min(100, 18 + 14 * Math.abs(from - to));
      my = (y1 + y2) / 2;
    } else if (Math.abs(a.top - b.top) < 4) { // along a row: below the cards
      const aside = from < to ? 6 : -6;
      [x1, y1, x2, y2] = [middle(a) + aside, bottom(a), middle(b) - aside, bottom(b)];
      mx = (x1 + x2) / 2;
      my = y1 + Math.min(44, 14 + 10 * Math.abs(from - to));
    } else {
      const down = b.top > a.top, aside = down ? 7 : -7;
      [x1, y1, x2, y2] = [middle(a) + aside, down ? bottom(a) : top(a), middle(b) + aside, down ? top(b) : bottom(b)];
      const far = Math.abs(y2 - y1) > 90 ? 40 : 0; // past the cards between them
      mx = (x1 + x2) / 2 + (down ? far : -far);
      my = (y1 + y2) / 2;
    }
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    const angle = Math.atan2(y2 - my, x2 - mx);
    const tip = (turn) => `${x2 - 9 * Math.cos(angle + turn)} ${y2 - 9 * Math.sin(angle + turn)}`;
    path.setAttribute("d", `M${x1} ${y1}Q${mx} ${my} ${x2} ${y2}M${tip(0.45)}L${x2} ${y2}L${tip(-0.45)}`);
    path.setAttribute("class", add ? "add" : "copy");
    arrows.appendChild(path);
  };
  const draw = () => {
    const links = new Map(), sent = new Array(world).fill(0);
    for (const step of steps.slice(0, at))
      for (const [src, dst, list] of step.moves) {
        const count = list.reduce((total, [a, b]) => total + b - a, 0);
        const key = src + " → " + dst;
        links.set(key, (links.get(key) || 0) + count);
        sent[src] += count;
      }
    const step = at ? steps[at - 1] : null;
    cards.forEach(({ sent: text, cells }, r) => {
      text.textContent = at ? "sent " + size(sent[r]) : "";
      cells.forEach((cell, c) => {
        const held = states[at][r][c].size;
        cell.style.setProperty("--f", held / world);
        cell.className = held === world ? "full" : "";
        cell.title = `chunk ${c} of rank ${r}: from ${held} of ${world} ranks`;
      });
    });
    arrows.replaceChildren();
    if (step)
      for (const [src, dst, list, add] of step.moves) {
        line(src, dst, add);
        for (const c of runs(list)) cards[dst].cells[c].classList.add("hit", ...(add ? ["add"] : []));
      }
    words.textContent = step
      ? `Step ${at} of ${steps.length}${step.label ? ": " + step.label : ""} · ${step.moves.length} messages${step.scales ? " · " + step.scales : ""}`
      : `Before the first of ${steps.length} steps: every rank has its own input, ${size(chunks)}`;
    slider.value = at;
    slider.setAttribute("aria-valuetext", words.textContent);
    const end = at === steps.length;
    proof.textContent = end ? (data.proved ? "✓ " : "✗ ") + data.proof : "";
    proof.className = "proof " + (end ? (data.proved ? "ok" : "no") : "");
    const most = [...links].sort((a, b) => b[1] - a[1]);
    summary.textContent = `Bytes per link so far: ${most.length} links, the busiest ${most.length ? size(most[0][1]) : "0 B"}`;
    table.replaceChildren();
    const head = make("tr", table);
    for (const name of ["link", "bytes"]) make("th", head, name);
    for (const [key, count] of most.slice(0, 40)) {
      const row = make("tr", table);
      make("td", row, key);
      make("td", row, size(count));
    }
    if (most.length > 40) make("td", make("tr", table), `and ${most.length - 40} more`);
  };
  const go = (k) => { at = Math.max(0, Math.min(steps.length, k)); draw(); };
  const stop = () => { clearInterval(timer); timer = null; play.textContent = "Play"; };
  play.onclick = () => {
    if (timer) return stop();
    if (at === steps.length) go(0);
    play.textContent = "Pause";
    timer = setInterval(() => { go(at + 1); if (at === steps.length) stop(); }, Math.max(250, Math.min(1200, 12000 / (steps.length || 1))));
  };
  slider.oninput = () => { stop(); go(Number(slider.value)); };
  back.onclick = () => { stop(); go(at - 1); };
  next.onclick = () => { stop(); go(at + 1); };
  addEventListener("resize", draw);
  details.addEventListener("toggle", draw);
  go(data.start === "end" ? steps.length : 0);
}
