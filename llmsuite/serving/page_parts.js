"use strict";
// Parts of the page to chat on: what is kept, elements, buttons, copying, and Markdown as what may be shown of it.
const parts = (() => {
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

  return {load, keep, element, act, copy, render};
})();
