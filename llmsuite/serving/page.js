"use strict";
// The page to chat on. What is on the screen is what models are sent: a conversation is a list of turns, kept in this
// browser. A message is followed by the answers of all models that were asked, side by side. A stopped answer stays with
// what it said, and a message without an answer is dropped by the next one.
(() => {
  const {load, keep, element, act, copy, render} = parts;
  const $ = (id) => document.getElementById(id);
  const CHATS = "llmsuite.chats", SETTINGS = "llmsuite.settings", MOST_CHATS = 50, MOST_MODELS = 3;
  const FIELDS = ["system", "temperature", "top_p", "tokens", "seed"];
  const running = new Map();  // answers that are being given, and what stops them
  const places = new WeakMap();  // where answers are shown
  let chat, names = [];

  // --- conversations

  const began = () => ({id: `${Date.now()}-${Math.random()}`, turns: []});

  function save(one) {
    const turns = one.turns.filter((turn) => !running.has(turn));
    if (turns.length && !one.gone)
      keep(CHATS, [{...one, turns}, ...load(CHATS, []).filter((each) => each.id !== one.id)].slice(0, MOST_CHATS));
    list();
  }

  function leave(next, gone = false) {
    chat.gone = gone;
    stop();
    chat = next;
    renderChat();
  }

  function list() {
    const chats = load(CHATS, []);
    $("past").querySelector("summary").textContent = `History (${chats.length})`;
    $("forget").hidden = !chats.length;
    $("conversations").replaceChildren(...chats.map((each) => {
      const title = each.turns[0].content.slice(0, 80);
      const open = act(title, () => {
        $("system").value = each.system ?? "";
        tick(rounds(each.turns).at(-1).answers.map((answer) => answer.model));
        leave(each);
      });
      open.className = "open";
      return element("li", {}, open, act("Delete", () => {
        keep(CHATS, load(CHATS, []).filter((one) => one.id !== each.id));
        if (chat.id === each.id) leave(began(), true);
        list();
      }, title));
    }));
  }

  // --- turns

  // messages, each with its answers
  function rounds(turns) {
    const found = [];
    for (const turn of turns) {
      if (turn.role === "user") found.push({asked: turn, answers: []});
      else found.at(-1).answers.push(turn);
    }
    return found;
  }

  const isAnswer = (turn) => !turn.error || !!turn.content.trim();

  function renderChat() {
    const all = rounds(chat.turns), last = all.at(-1);
    $("turns").replaceChildren(...all.flatMap((round) => {
      const items = round.answers.map((turn) => answer(turn, round, round === last));
      return [question(round.asked), ...(items.length ? [element("li", {className: "answers"}, ...items)] : [])];
    }));
    if (last && !last.answers.length)  // the page was closed before there was one
      $("turns").lastChild.querySelector(".acts").append(act("Try again", ask));
    document.body.classList.toggle("side-by-side", all.some((round) => round.answers.length > 1));
    state();
  }

  function question(turn) {
    const again = act("Edit", () => edit(made, turn), "your message");
    again.dataset.changes = "yes";
    const acts = element("div", {className: "acts"}, act("Copy", (button) => copy(turn.content, button), "your message"), again);
    const made = element("li", {className: "user"}, element("div", {className: "said", textContent: turn.content}), acts);
    made.setAttribute("aria-label", "You");
    return made;
  }

  function answer(turn, round, isLast) {
    const said = element("div", {className: "said"}), acts = element("div", {className: "acts"});
    const thoughts = element("details", {className: "thoughts", hidden: !turn.thoughts},
      element("summary", {textContent: "Thoughts"}), element("div", {textContent: turn.thoughts ?? ""}));
    const made = element("article", {className: "assistant"}, thoughts, said, acts);
    const who = names.length > 1 && turn.model || "", whose = who ? `the answer of ${who}` : "the answer";
    made.setAttribute("aria-label", who || "The model");
    if (who) made.prepend(element("h2", {textContent: who}));
    if (turn.content.trim()) render(said, turn.content, !running.has(turn));
    else if (turn.error) said.textContent = turn.error;
    else if (!running.has(turn)) said.append(element("em", {className: "muted", textContent: turn.note?.includes("stopped") ?
      "Stopped before the first word." : "The model ended its answer without a word."}));
    if (running.has(turn)) {
      if (round.answers.length > 1) acts.append(act("Stop", () => running.get(turn)?.abort(), whose));
    } else {
      const again = act(isAnswer(turn) ? "Regenerate" : "Try again", () => replace(turn, round), whose);
      if (!isLast) again.dataset.changes = "yes";
      if (isAnswer(turn)) acts.append(act("Copy", (button) => copy(turn.content, button), whose));
      acts.append(again);
      if (turn.note) acts.append(element("span", {className: "muted note", textContent: turn.note}));
      if (isAnswer(turn)) made.dataset.done = "yes";
      else made.classList.add("error");
      if (turn.error && turn.content.trim()) acts.before(element("p", {className: "bad", textContent: turn.error}));
    }
    places.set(turn, {made, round, isLast});
    return made;
  }

  // an answer has ended: only its own element changes, the others of the round continue
  function ended(turn) {
    const {made, round, isLast} = places.get(turn), hadFocus = made.contains(document.activeElement);
    const whole = answer(turn, round, isLast);
    made.replaceWith(whole);
    if (hadFocus) whole.querySelector("button").focus();
  }

  function edit(place, turn) {
    const area = element("textarea", {className: "edit", value: turn.content, rows: 3});
    area.setAttribute("aria-label", "Your message, to be changed");
    const send = () => {
      if (!area.value.trim()) return;
      chat.turns.length = chat.turns.indexOf(turn);
      chat.turns.push({role: "user", content: area.value.trim()});
      ask();
    };
    place.replaceChildren(area, element("div", {className: "acts"}, act("Send again", send), act("Cancel", renderChat)));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); send(); }
      if (event.key === "Escape") renderChat();
    });
    area.focus();
  }

  // --- answers

  function stop() { for (const one of running.values()) one.abort(); }
  function state() {
    $("send").textContent = running.size ? "Stop" : "Send";
    $("turns").setAttribute("aria-busy", String(running.size > 0));
    for (const button of document.querySelectorAll("[data-changes]")) button.disabled = running.size > 0;
  }

  // What a model reads is its own answers, and the first one that there is where it was not asked. A message that it
  // could not answer is not there for it.
  function messages(turns, own) {
    const system = $("system").value.trim(), found = system ? [{role: "system", content: system}] : [];
    for (const {asked, answers} of rounds(turns)) {
      const message = {role: "user", content: asked.content};
      if (answers.includes(own)) return [...found, message];
      const read = answers.find((one) => one.model === own.model) ?? answers.find(isAnswer);
      if (read && isAnswer(read)) found.push(message, {role: "assistant", content: read.content});
    }
  }

  function request(turns, own) {
    const number = (id) => $(id).value === "" ? undefined : Number($(id).value);
    return {model: own.model, stream: true, stream_options: {include_usage: true}, messages: messages(turns, own),
      temperature: number("temperature"), top_p: number("top_p"), max_tokens: number("tokens"), seed: number("seed")};
  }

  const headers = () => $("key").value ? {Authorization: `Bearer ${$("key").value}`} : {};

  async function* chunks(body, signal) {
    const response = await fetch("v1/chat/completions", {method: "POST", signal, body: JSON.stringify(body),
      headers: {"Content-Type": "application/json", ...headers()}});
    if (!response.ok) throw new Error((await response.json().catch(() => null))?.error?.message ?? `HTTP ${response.status}`);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") continue;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        yield chunk;
      }
    }
  }

  // ask the models that are ticked to answer the last message
  function ask() {
    stop();
    const asked = ticked().map((model) => ({role: "assistant", model, content: ""}));
    chat.turns.push(...asked);
    begin(asked);
  }

  // generate an answer again: later turns are removed, other answers of the round stay
  function replace(turn, round) {
    const stays = round.answers.length > 1 || ticked().includes(turn.model);
    const fresh = {role: "assistant", model: stays ? turn.model : ticked()[0], content: ""};
    chat.turns.length = chat.turns.indexOf(round.answers.at(-1)) + 1;
    chat.turns[chat.turns.indexOf(turn)] = fresh;
    begin([fresh]);
  }

  function begin(turns) {
    for (const turn of turns) running.set(turn, new AbortController());
    chat.system = $("system").value;
    renderChat();
    save(chat);
    follow(true);
    for (const turn of turns) give(chat, turn);
  }

  async function give(own, turn) {
    let first = 0, last = 0, tokens = 0, reason = "", frame = 0;
    const paint = () => {
      frame = 0;
      const {made} = places.get(turn), thoughts = made.querySelector(".thoughts");
      thoughts.hidden = !turn.thoughts;
      thoughts.lastChild.textContent = turn.thoughts ?? "";
      render(made.querySelector(".said"), turn.content, false);
      follow();
    };
    try {
      for await (const chunk of chunks(request(own.turns, turn), running.get(turn).signal)) {
        if (chunk.usage) tokens = chunk.usage.completion_tokens;
        for (const choice of chunk.choices) {
          const {content, reasoning_content: thought} = choice.delta;
          if (thought) turn.thoughts = (turn.thoughts ?? "") + thought;
          if (content) turn.content += content;
          if (content || thought) {
            last = performance.now();
            first ||= last;
            if (!chunk.usage) tokens += 1;  // until the server counts them
          }
          reason = choice.finish_reason || reason;
        }
        frame ||= requestAnimationFrame(paint);
      }
    } catch (problem) {
      if (problem.name !== "AbortError") turn.error = problem.message;
      reason = turn.error ? "broken off" : "stopped";
    }
    cancelAnimationFrame(frame);
    if (isAnswer(turn)) turn.note = note(tokens, first, last, reason);
    running.delete(turn);
    save(own);
    if (chat === own) { ended(turn); follow(); }
    state();
  }

  function note(tokens, first, last, reason) {
    const seconds = (last - first) / 1000;
    const speed = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
    const why = {length: "; the limit of tokens is reached", stopped: "; stopped", "broken off": "; broken off"}[reason] ?? "";
    return `${tokens} token${tokens === 1 ? "" : "s"}${speed}${why}`;
  }

  // keep the end in sight, unless somebody has scrolled up to read
  function follow(always = false) {
    const left = document.documentElement.scrollHeight - innerHeight - scrollY;
    if (always || left < 160) scrollTo(0, document.documentElement.scrollHeight);
  }

  // --- what people do

  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running.size) { stop(); return; }
    const text = $("text").value.trim();
    if (!text) return;
    $("text").value = "";
    const last = rounds(chat.turns).at(-1);
    if (last && !last.answers.some(isAnswer)) chat.turns.length = chat.turns.indexOf(last.asked);
    chat.turns.push({role: "user", content: text});
    ask();
  });
  $("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("form").requestSubmit(); }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
  $("new").addEventListener("click", () => { leave(began()); $("text").focus(); });
  $("forget").addEventListener("click", () => { keep(CHATS, []); leave(began(), true); list(); });
  for (const id of FIELDS) $(id).addEventListener("change", keepSettings);
  $("key").addEventListener("change", models);
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (key) {  // of a server that the studio has started; the address that stays does not have it
    $("key").value = key;
    history.replaceState(null, "", location.pathname);
  }
  $("which").addEventListener("change", (event) => {
    if (!boxes().some((box) => box.checked)) event.target.checked = true;  // somebody has to answer
    showModels();
    keepSettings();
  });

  function keepSettings() {
    keep(SETTINGS, {...Object.fromEntries(FIELDS.map((each) => [each, $(each).value])), models: ticked()});
  }

  // --- the models served here, where there is more than one

  const boxes = () => [...$("which").querySelectorAll("input")];
  const ticked = () => names.length ? boxes().filter((box) => box.checked).map((box) => box.value) : [undefined];

  // tick those of these models that are served; without any everything stays
  function tick(wanted) {
    const served = names.filter((name) => wanted.includes(name)).slice(0, MOST_MODELS);
    if (!served.length) return;
    for (const box of boxes()) box.checked = served.includes(box.value);
    showModels();
  }

  function showModels() {
    const now = ticked();
    for (const box of boxes()) box.disabled = !box.checked && now.length === MOST_MODELS;
    $("models").querySelector("summary").textContent = `Model${now.length > 1 ? "s" : ""}: ${now.join(", ")}`;
  }

  async function models() {
    const health = await fetch("healthz").then((r) => r.json()).catch(() => null);
    if (health) $("model").textContent = document.title = health.model;
    const response = await fetch("v1/models", {headers: headers()}).catch(() => null);
    if (!response?.ok) return;
    const all = (await response.json()).data;
    const served = all.filter(({id, root}) => (root ?? id) === id).map((model) => model.id);  // one name of each
    if (served.join() === names.join()) return;
    const before = names.length ? ticked() : load(SETTINGS, {}).models ?? [];
    names = served;
    $("models").hidden = names.length < 2;
    $("which").replaceChildren(...names.map((name) =>
      element("label", {}, element("input", {type: "checkbox", value: name}), ` ${name}`)));
    tick(names.slice(0, 1));
    tick(before);
  }

  const settings = load(SETTINGS, {});
  for (const id of FIELDS) if (settings[id] !== undefined) $(id).value = settings[id];
  chat = began();
  list();
  state();
  models();
})();
