"use strict";
// The page to chat on. What is on the screen is what the model is sent: a conversation is a list of turns, kept in this
// browser; a stopped answer stays with what it said, and a question without an answer is dropped by the next one.
(() => {
  const $ = (id) => document.getElementById(id);
  const CHATS = "llmsuite.chats", SETTINGS = "llmsuite.settings", MOST_CHATS = 50;
  const FIELDS = ["system", "temperature", "top_p", "tokens", "seed"];
  let chat, running = null;

  // A browser may refuse to keep anything; then it is kept for as long as the page is open.
  const memory = new Map();
  const load = (key, other) => {
    try { return JSON.parse(localStorage.getItem(key)) ?? memory.get(key) ?? other; } catch { return memory.get(key) ?? other; }
  };
  const keep = (key, value) => {
    memory.set(key, value);
    try { localStorage.setItem(key, JSON.stringify(value)); } catch { /* it is full or not allowed */ }
  };
  const element = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  const act = (text, does, label = text) => {
    const made = element("button", {type: "button", textContent: text});
    if (label !== text) made.setAttribute("aria-label", `${text}: ${label}`);
    made.addEventListener("click", () => does(made));
    return made;
  };

  async function copy(text, button) {
    const before = button.textContent;
    const copied = await navigator.clipboard?.writeText(text).then(() => true, () => false) || copyBySelection(text);
    button.textContent = copied ? "Copied" : "The browser refused";
    setTimeout(() => { button.textContent = before; }, 1500);
  }

  // where pages have no clipboard: those of other machines without TLS
  function copyBySelection(text) {
    const area = element("textarea", {value: text}), before = document.activeElement;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    before?.focus();
    return done;
  }

  // What models write is Markdown at best and hostile at worst. HTML in it is shown as the text it is, images by their
  // names; of what Markdown makes, nothing but text, lists, tables, links and code is let through.
  const escaped = (text) => element("span", {textContent: text}).innerHTML;
  marked.use({gfm: true, breaks: true, renderer: {html: ({text}) => escaped(text), image: ({text}) => escaped(text)}});
  DOMPurify.addHook("afterSanitizeAttributes", (node) => {
    if (node.tagName === "A") { node.setAttribute("target", "_blank"); node.setAttribute("rel", "noopener noreferrer"); }
  });
  const SAFE = {USE_PROFILES: {html: true}, FORBID_ATTR: ["style", "id", "name"], ALLOW_DATA_ATTR: false,
    FORBID_TAGS: ["img", "picture", "video", "audio", "style", "form", "input", "button", "textarea", "select", "map",
      "area", "dialog"]};

  function render(place, text, whole) {
    place.innerHTML = DOMPurify.sanitize(marked.parse(text), SAFE);
    for (const code of place.querySelectorAll("pre > code")) {
      const language = /language-([\w+#-]+)/.exec(code.className)?.[1];
      if (language && hljs.getLanguage(language)) {
        code.innerHTML = hljs.highlight(code.textContent, {language}).value;  // hljs escapes what it is given
      }
      if (!whole) continue;
      const pre = code.parentElement, block = element("div", {className: "block"});
      pre.tabIndex = 0;
      pre.replaceWith(block);
      block.append(pre, act("Copy", (button) => copy(code.textContent, button), "this code"));
    }
  }

  // --- conversations

  const began = () => ({id: `${Date.now()}-${Math.random()}`, turns: []});

  function save(one) {
    if (one.turns.length && !one.gone)
      keep(CHATS, [one, ...load(CHATS, []).filter((each) => each.id !== one.id)].slice(0, MOST_CHATS));
    list();
  }

  function leave(next, gone = false) {
    chat.gone = gone;
    stop();
    chat = next;
    draw();
  }

  function list() {
    const chats = load(CHATS, []);
    $("past").querySelector("summary").textContent = `History (${chats.length})`;
    $("forget").hidden = !chats.length;
    $("conversations").replaceChildren(...chats.map((each) => {
      const title = each.turns[0].content.slice(0, 80);
      const open = act(title, () => { $("system").value = each.system ?? ""; leave(each); });
      open.className = "open";
      return element("li", {}, open, act("Delete", () => {
        keep(CHATS, load(CHATS, []).filter((one) => one.id !== each.id));
        if (chat.id === each.id) leave(began(), true);
        list();
      }, title));
    }));
  }

  // --- turns

  function draw() {
    $("turns").replaceChildren(...chat.turns.map(item));
    if (!running && chat.turns.at(-1)?.role === "user")
      $("turns").lastChild.querySelector(".acts").append(act("Try again", answer));
    state();
  }

  function item(turn, index) {
    const said = element("div", {className: "said"});
    const made = element("li", {className: turn.role}, said);
    made.setAttribute("aria-label", turn.role === "user" ? "You" : "The model");
    if (turn.role === "user") said.textContent = turn.content;
    else if (turn.content.trim()) render(said, turn.content, true);
    else said.append(element("em", {className: "muted", textContent: turn.note?.includes("stopped") ?
      "Stopped before the first word." : "The model ended its answer without a word."}));
    const acts = [act("Copy", (button) => copy(turn.content, button), turn.role === "user" ? "your message" : "the answer")];
    if (turn.role === "user") acts.push(act("Edit", () => edit(made, turn, index), "your message"));
    else acts.push(act("Regenerate", () => { chat.turns.length = index; answer(); }, "the answer"));
    acts[1].dataset.changes = "yes";
    if (turn.note) acts.push(element("span", {className: "muted note", textContent: turn.note}));
    made.append(element("div", {className: "acts"}, ...acts));
    if (turn.role === "assistant") made.dataset.done = "yes";
    return made;
  }

  function edit(place, turn, index) {
    const area = element("textarea", {className: "edit", value: turn.content, rows: 3});
    area.setAttribute("aria-label", "Your message, to be changed");
    const send = () => {
      if (!area.value.trim()) return;
      chat.turns.length = index;
      chat.turns.push({role: "user", content: area.value.trim()});
      answer();
    };
    place.replaceChildren(area, element("div", {className: "acts"}, act("Send again", send), act("Cancel", draw)));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); send(); }
      if (event.key === "Escape") draw();
    });
    area.focus();
  }

  // --- answers

  function stop() { running?.abort(); running = null; state(); }
  function state() {
    $("send").textContent = running ? "Stop" : "Send";
    $("turns").setAttribute("aria-busy", String(!!running));
    for (const button of document.querySelectorAll("[data-changes]")) button.disabled = !!running;
  }

  function asked() {
    const number = (id) => $(id).value === "" ? undefined : Number($(id).value);
    const system = $("system").value.trim();
    const turns = chat.turns.map(({role, content}) => ({role, content}));
    return {model: $("which").value || undefined, stream: true, stream_options: {include_usage: true},
      messages: [...(system ? [{role: "system", content: system}] : []), ...turns],
      temperature: number("temperature"), top_p: number("top_p"), max_tokens: number("tokens"), seed: number("seed")};
  }

  const headers = () => $("key").value ? {Authorization: `Bearer ${$("key").value}`} : {};

  async function* chunks(signal) {
    const response = await fetch("v1/chat/completions", {method: "POST", signal, body: JSON.stringify(asked()),
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

  async function answer() {
    stop();
    const own = chat, mine = running = new AbortController();
    own.system = $("system").value;
    draw();
    save(own);
    const said = element("div", {className: "said"}), place = element("li", {className: "assistant"}, said);
    $("turns").append(place);
    follow(true);
    let text = "", first = 0, last = 0, tokens = 0, reason = "", frame = 0, error = null;
    const paint = () => { frame = 0; render(said, text, false); follow(); };
    try {
      for await (const chunk of chunks(mine.signal)) {
        if (chunk.usage) tokens = chunk.usage.completion_tokens;
        for (const choice of chunk.choices) {
          if (choice.delta.content) {
            text += choice.delta.content;
            last = performance.now();
            first ||= last;
            if (!chunk.usage) tokens += 1;  // until the server counts them
          }
          reason = choice.finish_reason || reason;
        }
        frame ||= requestAnimationFrame(paint);
      }
    } catch (problem) {
      error = problem.name === "AbortError" ? null : problem;
      reason = error ? "broken off" : "stopped";
    }
    cancelAnimationFrame(frame);
    if (!error || text) own.turns.push({role: "assistant", content: text, note: note(tokens, first, last, reason)});
    if (running === mine) running = null;
    save(own);
    if (chat === own) {
      draw();
      if (error) fail(error);
      follow();
    }
  }

  function note(tokens, first, last, reason) {
    const seconds = (last - first) / 1000;
    const speed = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
    const why = {length: "; the limit of tokens is reached", stopped: "; stopped", "broken off": "; broken off"}[reason] ?? "";
    return `${tokens} token${tokens === 1 ? "" : "s"}${speed}${why}`;
  }

  function fail(error) {
    const made = element("li", {className: "error"}, element("div", {className: "said", textContent: error.message}));
    $("turns").append(made);
    follow(true);
  }

  // keep the end in sight, unless somebody has scrolled up to read
  function follow(always = false) {
    const left = document.documentElement.scrollHeight - innerHeight - scrollY;
    if (always || left < 160) scrollTo(0, document.documentElement.scrollHeight);
  }

  // --- what people do

  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) { stop(); return; }
    const text = $("text").value.trim();
    if (!text) return;
    $("text").value = "";
    if (chat.turns.at(-1)?.role === "user") chat.turns.pop();  // it got no answer
    chat.turns.push({role: "user", content: text});
    answer();
  });
  $("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("form").requestSubmit(); }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) stop(); });
  $("new").addEventListener("click", () => { leave(began()); $("text").focus(); });
  $("forget").addEventListener("click", () => { keep(CHATS, []); leave(began(), true); list(); });
  for (const id of FIELDS)
    $(id).addEventListener("change", () => keep(SETTINGS, Object.fromEntries(FIELDS.map((each) => [each, $(each).value]))));
  $("key").addEventListener("change", models);

  // the models served here, where there is more than one
  async function models() {
    const health = await fetch("healthz").then((r) => r.json()).catch(() => null);
    if (health) $("model").textContent = document.title = health.model;
    const answer = await fetch("v1/models", {headers: headers()}).catch(() => null);
    if (!answer?.ok) return;
    const names = (await answer.json()).data.map((model) => model.id);
    $("models").hidden = names.length < 2;
    const before = $("which").value;
    $("which").replaceChildren(...names.map((name) => element("option", {value: name, textContent: name})));
    if (names.includes(before)) $("which").value = before;
  }

  const settings = load(SETTINGS, {});
  for (const id of FIELDS) if (settings[id] !== undefined) $(id).value = settings[id];
  chat = began();
  list();
  state();
  models();
})();
