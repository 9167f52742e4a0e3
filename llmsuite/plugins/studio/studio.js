"use strict";
// The studio: a recipe with changes is checked as it is typed, planned, started; runs are watched and talked to.
(() => {
  const $ = (id) => document.getElementById(id);
  const token = new URLSearchParams(location.search).get("token");
  const changes = new Map();
  let recipes = [], keys = [], verdict = null, asked = 0;

  const element = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };

  async function ask(path, body) {
    const query = body === undefined ? `?token=${encodeURIComponent(token)}` : "";
    const answer = await fetch(path + query, body === undefined ? {} :
      {method: "POST", body: JSON.stringify(body), headers: {"Content-Type": "application/json", "X-Token": token}});
    const told = await answer.json().catch(() => ({error: `the studio answers ${answer.status}`}));
    if (!answer.ok) throw new Error(told.error ?? `the studio answers ${answer.status}`);
    return told;
  }

  const fault = (text) => { $("fault").textContent = text; $("fault").hidden = !text; };
  const tried = (does) => async (...given) => {
    try { await does(...given); fault(""); } catch (error) { fault(error.message); }
  };
  const filled = () => ({recipe: $("recipe").value, smoke: $("smoke").checked, changes: Object.fromEntries(changes)});

  // --- recipes and their keys

  function offer() {
    const words = $("find").value.toLowerCase().split(/\s+/);
    const fitting = recipes.filter((one) => words.every((word) => JSON.stringify(one).toLowerCase().includes(word)));
    const before = $("recipe").value;
    $("recipe").replaceChildren(...fitting.map((one) => element("option", {value: one.recipe,
      textContent: one.stage === "own" ? `${one.recipe} — yours` :
        `${one.recipe.replace(/^recipes\//, "")} — ${one.stage} of ${one.model}, ${one.devices} ${one.device}`})));
    if (fitting.some((one) => one.recipe === before)) $("recipe").value = before;
    else choose();
  }

  const choose = () => { changes.clear(); read(); };

  // Shows a recipe that is a file of the user.
  function open(recipe) {
    recipes = [{recipe, stage: "own"}, ...recipes.filter((one) => one.recipe !== recipe)];
    $("find").value = "";
    offer();
    $("recipe").value = recipe;
    choose();
  }

  $("open").addEventListener("submit", (event) => {
    event.preventDefault();
    if ($("own").value.trim()) open($("own").value.trim());
  });

  $("new").addEventListener("submit", tried(async (event) => {
    event.preventDefault();
    const text = $("make").textContent;
    $("make").disabled = true;
    $("make").textContent = "Counting the rows …";
    $("made").hidden = true;
    try {
      const made = await ask("new", Object.fromEntries(["weights", "data", "stage", "method"].map(
        (name) => [name, $(`new-${name}`).value])));
      $("made").textContent = `${made.recipe}\n${made.text}`;
      $("made").hidden = false;
      $("smoke").checked = false;
      open(made.recipe);
    } finally {
      $("make").disabled = false;
      $("make").textContent = text;
    }
  }));

  const read = tried(async () => {
    keys = $("recipe").value ? await ask("keys", filled()) : [];
    $("keys").replaceChildren(...keys.map(row));
    sift();
    await check();
  });

  function row(key) {
    const id = `key-${key.key}`, help = element("p", {className: "muted", textContent: `${key.help} (${key.type})`});
    const field = key.options.length ? element("select", {},
      ...[...new Set([key.value, ...key.options])].map((value) => element("option", {value, textContent: value}))) :
      element("input", {type: "text", value: key.value});
    field.id = id;
    field.value = changes.get(key.key) ?? key.value;
    help.id = `${id}-help`;
    field.setAttribute("aria-describedby", help.id);
    const made = element("div", {className: "key"}, element("label", {htmlFor: id, textContent: key.key}), field, help,
      element("p", {className: "bad", hidden: true}));
    made.dataset.key = key.key;
    made.classList.toggle("changed", changes.has(key.key));
    field.addEventListener("input", () => {
      if (field.value === key.value) changes.delete(key.key);
      else changes.set(key.key, field.value);
      made.classList.toggle("changed", changes.has(key.key));
      later();
    });
    return made;
  }

  // A search looks at all keys; without one, those of the recipe are shown, those that were changed, and wrong ones.
  function sift() {
    const word = $("find-key").value.toLowerCase();
    let count = 0;
    for (const [i, made] of [...$("keys").children].entries()) {
      const {key, help, given} = keys[i];
      const isShown = $("all-keys").checked || given || changes.has(key) || !made.lastChild.hidden;
      made.hidden = word ? !`${key} ${help}`.toLowerCase().includes(word) : !isShown;
      count += !made.hidden;
    }
    $("count").textContent = `${count} of ${keys.length} keys, ${changes.size} changed`;
  }

  // --- check, plan, start

  let timer = 0;
  const later = () => { $("start").disabled = true; clearTimeout(timer); timer = setTimeout(check, 250); sift(); };

  const check = tried(async () => {
    const number = ++asked, told = await ask("check", filled());
    if (number !== asked) return;  // a later one is under way
    verdict = told;
    $("command").textContent = told.command;
    $("planned").hidden = $("explained").hidden = true;
    const other = [], remedies = [];
    for (const made of $("keys").children) { made.lastChild.hidden = true; made.lastChild.textContent = ""; }
    for (const {key, message, remedy} of told.problems) {
      if (remedy && !remedies.some((one) => one.key === remedy.key)) remedies.push(remedy);
      const place = [...$("keys").children].find((made) => made.dataset.key === key)?.lastChild;
      if (place) { place.textContent += `${message} `; place.hidden = false; }
      other.push(key ? `${key}: ${message}` : message);
    }
    const right = !told.problems.length;
    $("verdict").className = right ? "good" : "bad";
    $("remedies").replaceChildren(...remedies.map(mend));
    $("verdict").textContent = (right ? [`Recipe is valid: ${told.made} → ${told.run}`, ...told.notes] : other).join("\n");
    $("start").disabled = $("plan").disabled = !right;
    sift();
  });

  // A button that fills in what probably mends a problem.
  const mend = ({key, value}) => button(`Fill in ${key}: ${value}`, () => {
    const field = $(`key-${key}`);
    field.value = value;
    field.dispatchEvent(new Event("input"));
  });

  $("explain").addEventListener("click", tried(async () => {
    $("explain").disabled = true;
    try {
      const {text} = await ask("explain", {...filled(), row: Number($("row").value)});
      $("explained").replaceChildren(...text.trimEnd().split("\n").map((line) => element("div",
        {textContent: line, className: isTrained(line) ? "trained" : ""})));
      $("explained").hidden = false;
    } finally { $("explain").disabled = false; }
  }));

  // Lines of tokens begin with position, id, role, document and label; the label of a token that is not trained is "-".
  const isTrained = (line) => /^\s*\d+\s+\d+\s+\S+\s+\S+\s+\d/.test(line);

  $("plan").addEventListener("click", tried(async () => {
    $("planned").textContent = (await ask("plan", filled())).text;
    $("planned").hidden = false;
  }));
  $("start").addEventListener("click", tried(async () => {
    $("start").disabled = true;
    try { await ask("start", filled()); } finally { $("start").disabled = false; }
    await runs();
  }));

  // --- runs

  const shown = new Map();  // items of the list by the name of their run, and what they say

  async function runs() {
    const known = await ask("runs");
    const names = new Set(known.map((one) => one.run));
    for (const name of [...shown.keys()]) if (!names.has(name)) shown.delete(name);
    $("runs").replaceChildren(...known.map((one) => {
      const said = JSON.stringify(one), before = shown.get(one.run);
      if (before?.said === said) return before.item;
      const made = {said, item: item(one)};
      shown.set(one.run, made);
      return made.item;
    }));
    if (!known.length) $("runs").append(element("li", {className: "muted", textContent: "No run so far."}));
  }

  function item(one) {
    const steps = one.cards?.Steps, loss = one.cards?.Loss;
    const numbers = [steps && `step ${steps[0]}${steps[1] ? `, ${steps[1]}` : ""}`, loss && `loss ${loss[0]}`].filter(Boolean);
    const state = element("b", {textContent: one.status});
    state.className = {ended: "good", failed: "bad", hung: "bad", died: "bad", stopped: "warn"}[one.status] ?? "";
    const acts = element("div", {className: "row"});
    if (one.can_watch) {
      const query = new URLSearchParams({run: one.run, token});
      acts.append(element("a", {className: "button watch", textContent: "Watch", target: "_blank", href: `watch/?${query}`}));
    }
    if (one.is_running) acts.append(button("Stop", () => ask("stop", {run: one.run})));
    if (one.can_talk) acts.append(button("Talk to it", (self) => talk(one.run, self)));
    const made = element("li", {}, element("code", {textContent: one.run}), " ", state, ` ${numbers.join(", ")}`, acts);
    if (one.log) made.append(element("pre", {textContent: one.log, tabIndex: 0}));
    made.dataset.run = one.run;
    return made;
  }

  function button(text, does) {
    const made = element("button", {type: "button", textContent: text});
    made.addEventListener("click", tried(async () => { await does(made); }));
    return made;
  }

  async function talk(run, self) {
    self.disabled = true;
    self.textContent = "Loading the model …";
    try {
      for (;;) {
        const {address} = await ask("talk", {run});
        if (address) {
          self.replaceWith(element("a", {className: "button chat", textContent: "Chat", target: "_blank", href: address}));
          return;
        }
        await new Promise((done) => { setTimeout(done, 1000); });
      }
    } catch (error) {
      self.disabled = false;
      self.textContent = "Talk to it";
      throw error;
    }
  }

  async function refresh() {
    try { await runs(); } catch (error) { fault(`The studio does not answer: ${error.message}`); }
    setTimeout(refresh, 2000);
  }

  $("find").addEventListener("input", offer);
  $("recipe").addEventListener("change", choose);
  $("smoke").addEventListener("change", read);
  $("find-key").addEventListener("input", sift);
  $("all-keys").addEventListener("change", sift);
  tried(async () => { recipes = await ask("recipes"); offer(); })();
  refresh();
})();
