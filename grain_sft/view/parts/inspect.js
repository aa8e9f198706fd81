"use strict";
(() => {
  const CHUNK = 400; // tokens that are laid out together, up to the end of a line
  const LONGEST_CHUNK = 1200; // tokens of a chunk if no line ends before
  const HUES = 6; // colours of segments: the classes s0 to s5 of inspect.css
  const find = (id) => document.getElementById(id);
  const area = find("tokens");
  const data = JSON.parse(find("data").textContent);
  const shown = new Map(data.pieces.ids.map((id, at) => [id, data.pieces.shown[at]]));
  const special = new Set(data.pieces.special);
  const number = (value) => value.toLocaleString("en");
  // indices in `data.steps` and in the rows of that step; number of the only segment to show, or null for all
  const state = { step: data.at, row: 0, segment: null };

  const bytes = (text) => Uint8Array.from(atob(text), (each) => each.charCodeAt(0));

  // the chosen row, whose arrays are decoded on first use
  const row = () => {
    const found = data.steps[state.step].rows[state.row];
    if (found.tokens) return found;
    const raw = bytes(found.ids);
    found.tokens = found.width === 2 ? new Uint16Array(raw.buffer) : new Int32Array(raw.buffer);
    found.bits = bytes(found.loss);
    found.weight = found.weights === null ? null : new Float32Array(bytes(found.weights).buffer);
    found.text = new Map();
    for (const [first, stop, whole] of found.split) {
      found.text.set(first, whole);
      for (let at = first + 1; at < stop; at++) found.text.set(at, "‿");
    }
    return found;
  };
  const takesLoss = (view, at) => ((view.bits[at >> 3] >> (at & 7)) & 1) === 1;
  // text of a token id; in a row, `pieces` are parts of token files instead
  const piece = (id) => shown.get(id) ?? `⟨${id}⟩`;
  const element = (name, text, className) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };

  const token = (view, at) => {
    const id = view.tokens[at];
    const made = element("span", view.text.get(at) ?? piece(id));
    made.className = "t" + (takesLoss(view, at) ? " l" : "") + (special.has(id) ? " x" : "");
    made.dataset.i = at;
    return made;
  };

  // elements with the tokens from `first` to `stop` - 1; the browser lays out only the chunks in view
  const chunks = function* (view, first, stop) {
    let chunk = element("div", undefined, "chunk"), count = 0;
    for (let at = first; at < stop; at++) {
      const made = token(view, at);
      if (at > first) chunk.append(document.createElement("wbr"));
      chunk.append(made);
      count++;
      const ends = made.textContent.endsWith("⏎");
      if ((ends && count >= CHUNK) || count >= LONGEST_CHUNK) {
        yield chunk;
        chunk = element("div", undefined, "chunk");
        count = 0;
      } else if (ends) chunk.append(document.createElement("br"));
    }
    if (count) yield chunk;
  };

  const title = (view, name) => view.names.length ? `${name}, ${view.names[name - 1]}` : `${name}`;

  // element for a run of tokens. `name` is the number of the run's segment; 0 is padding
  const segment = (view, [name, first, stop]) => {
    const made = element("section", undefined, name ? `s${(name - 1) % HUES}` : "padding");
    if (!name) {
      made.append(element("p", `padding: ${number(stop - first)} tokens, of id ${view.tokens[first]}`));
      return made;
    }
    let loss = 0;
    for (let at = first; at < stop; at++) loss += takesLoss(view, at);
    const count = stop - first;
    made.append(element("h2", `Segment ${title(view, name)}: ${number(count)} tokens, ${number(loss)} take loss`));
    for (const each of view.pieces) {
      const isHere = each.segment === name && each.column < stop && first < each.column + each.stop - each.start;
      if (isHere) made.append(element("p", each.words, "where"));
    }
    made.append(...chunks(view, first, stop));
    return made;
  };

  const options = (select, entries, chosen) => {
    select.replaceChildren(...entries.map(([value, text]) => {
      const made = element("option", text);
      made.value = value;
      return made;
    }));
    select.value = chosen;
  };

  const render = () => {
    const step = data.steps[state.step];
    state.row = Math.min(state.row, step.rows.length - 1);
    const view = row();
    const names = view.segments.filter(([name]) => name);
    if (!names.some(([name]) => name === state.segment)) state.segment = null;
    find("previous").disabled = state.step === 0;
    find("next").disabled = state.step === data.steps.length - 1;
    find("previous-step").textContent = state.step ? `Step ${data.steps[state.step - 1].step}` : "none before";
    find("next-step").textContent = find("next").disabled ? "none after" : `Step ${data.steps[state.step + 1].step}`;
    options(find("row"), step.rows.map((each, at) => [at, `${each.row} of ${step.rows_of_batch}`]), state.row);
    const entries = names.map(([name, first, stop]) => {
      const from = view.pieces.find((each) => each.segment === name);
      const source = from ? ` ${from.source}` : "";
      return [name, `${title(view, name)}:${source} (${number(stop - first)} tokens)`];
    });
    options(find("segment"), [["", `all ${names.length}`], ...entries], state.segment ?? "");
    const instance = view.instance < 0 ? "nothing but padding" : `instance ${number(view.instance)} of the layout`;
    const host = data.host[1] > 1 ? `, host ${data.host[0]} of ${data.host[1]}` : "";
    document.querySelector("h1").textContent = `Step ${step.step}: ${data.title}`;
    const epoch = view.epoch < 0 ? "Row" : `Epoch ${view.epoch}, row`;
    find("about").textContent = `${epoch} ${view.row} of this host, slot ${view.slot} of the global batch` +
      `${host}: ${instance}. ${number(view.length)} tokens. Receipt ${data.receipt}.`;
    find("notes").replaceChildren(...view.notes.map((note) => element("li", note)));
    const runs = state.segment === null ? view.segments : names.filter(([name]) => name === state.segment);
    area.replaceChildren(...runs.map((run) => segment(view, run)));
    if (view.names.length && state.segment === null) { // the responses of a pair, next to each other
      const sides = element("div", undefined, "sides"), [prompt, ...responses] = area.children;
      sides.append(...responses.slice(0, view.names.length - 1));
      prompt.after(sides);
    }
    const start = area.querySelector(".t");
    if (start) start.tabIndex = 0;
    document.documentElement.dataset.shown = `${step.step}/${view.row}/${state.segment ?? "all"}`;
  };

  // [name, text, class of the width] for each fact about token `at` of the row
  const facts = (at) => {
    const view = row(), id = view.tokens[at];
    const run = view.segments.find(([, first, stop]) => first <= at && at < stop);
    // `positions` lists [token, position] only where a position is not 1 more than the one before
    const [place, position] = view.positions.findLast(([first]) => first <= at);
    const from = view.pieces.find((each) => each.segment === run[0] && at < each.column + each.stop - each.start);
    const loss = takesLoss(view, at);
    const weight = view.weight === null ? (loss ? 1 : 0) : view.weight[at];
    const found = [["token", number(at)], ["id", id], ["position", number(position + at - place)], ["segment", run[0]]];
    found.push(["takes loss", loss ? "yes" : "no"], ["weight", `${+weight.toPrecision(6)}`]);
    found.push(["piece", shown.get(id) ?? "no text", "wide"]);
    if (view.text.has(at)) found.push(["shown", view.text.get(at)]);
    if (from) {
      const document = from.document === null ? "" : `${number(from.document)} `;
      found.push(["document", `${document}${from.source ? "of " : ""}${from.source}` || "not known", "all"]);
      found.push(["file", `${from.file}, token ${number(from.start + at - from.column)}`, "all"]);
    }
    return found;
  };

  const describe = (at) => {
    const list = element("dl");
    for (const [name, value, width] of facts(at)) {
      const pair = element("div", undefined, width);
      const shownValue = element("dd", value);
      shownValue.dataset.fact = name;
      pair.append(element("dt", name), shownValue);
      list.append(pair);
    }
    find("detail").replaceChildren(list);
  };

  const focus = (to) => {
    if (!to) return;
    for (const old of area.querySelectorAll('.t[tabindex="0"]')) old.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  };
  const tokenOf = (target) => target.closest?.("main .t");
  const change = (fields) => {
    Object.assign(state, fields);
    const hadFocus = area.contains(document.activeElement);
    render();
    if (hadFocus) focus(area.querySelector(".t"));
  };
  // the next token (`by` 1) or the token before (-1), also in another chunk or segment
  const neighbour = (from, by) => {
    let to = from;
    do {
      to = by > 0 ? to.nextElementSibling : to.previousElementSibling;
    } while (to && !to.matches(".t"));
    if (to) return to;
    const all = [...area.querySelectorAll(".chunk")];
    const chunk = all[all.indexOf(from.parentElement) + by];
    const tokens = chunk?.querySelectorAll(".t");
    return tokens && tokens[by > 0 ? 0 : tokens.length - 1];
  };
  const inOtherLine = (from, by) => { // the nearest token of the next line (`by` 1) or of the line before (-1)
    const begin = from.getBoundingClientRect();
    let to = from, best = from, gap = Infinity, line = null;
    for (let count = 0; count < 2000; count++) {
      to = neighbour(to, by);
      if (!to) break;
      const place = to.getBoundingClientRect();
      if (Math.abs(place.top - begin.top) < begin.height / 2) continue;
      line ??= place.top;
      if (Math.abs(place.top - line) > begin.height / 2) break;
      if (Math.abs(place.left - begin.left) < gap) [best, gap] = [to, Math.abs(place.left - begin.left)];
    }
    return best;
  };
  const moveSegment = (by) => {
    const names = [...new Set(row().segments.map(([name]) => name))].filter((name) => name);
    const at = names.indexOf(state.segment) + by; // -1 and `names.length` mean all segments
    change({ segment: at < -1 ? names[names.length - 1] : names[at] ?? null });
  };

  const keys = {
    n: () => state.step + 1 < data.steps.length && change({ step: state.step + 1 }),
    p: () => state.step && change({ step: state.step - 1 }),
    j: () => state.row + 1 < data.steps[state.step].rows.length && change({ row: state.row + 1, segment: null }),
    k: () => state.row && change({ row: state.row - 1, segment: null }),
    "]": () => moveSegment(1),
    "[": () => moveSegment(-1),
    0: () => change({ segment: null }),
  };
  const moves = {
    ArrowRight: (from) => neighbour(from, 1),
    ArrowLeft: (from) => neighbour(from, -1),
    ArrowDown: (from) => inOtherLine(from, 1),
    ArrowUp: (from) => inOtherLine(from, -1),
    Home: () => area.querySelector(".t"),
    End: () => [...area.querySelectorAll(".t")].pop(),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches?.("select")) return;
    const from = tokenOf(event.target);
    if (from && moves[event.key]) focus(moves[event.key](from));
    else if (keys[event.key]) keys[event.key]();
    else return;
    event.preventDefault();
  });
  area.addEventListener("mouseover", (event) => tokenOf(event.target) && describe(+tokenOf(event.target).dataset.i));
  area.addEventListener("click", (event) => focus(tokenOf(event.target)));
  area.addEventListener("focusin", (event) => tokenOf(event.target) && describe(+tokenOf(event.target).dataset.i));
  find("previous").addEventListener("click", keys.p);
  find("next").addEventListener("click", keys.n);
  find("row").addEventListener("change", (event) => change({ row: +event.target.value, segment: null }));
  find("segment").addEventListener("change", (event) => {
    change({ segment: event.target.value === "" ? null : +event.target.value });
  });
  render();
})();
