"use strict";
// The page of a run: what was written into it, or, from a server, what there is at the moment.
(() => {
  const $ = (id) => document.getElementById(id);
  const charts = document.createElement("div");  // kept while what is around it is replaced
  let seen = null;

  function show(content) {
    const open = new Map([...document.querySelectorAll("details")].map((d) => [d.dataset.key, d.open]));
    const top = $("events")?.scrollTop ?? 0, focused = document.activeElement;
    $("content").innerHTML = content.html;  // escaped where it was made
    for (const each of document.querySelectorAll("details"))
      if (open.has(each.dataset.key)) each.open = open.get(each.dataset.key);
    if ($("events")) $("events").scrollTop = top;
    $("drawn")?.replaceWith(charts);
    Charts.draw(charts, content.charts);
    if (charts.contains(focused)) focused.focus();
  }

  async function refresh() {
    try {
      const answer = await fetch("content" + location.search, seen ? {headers: {"If-None-Match": seen}} : {});
      $("lost").hidden = true;
      if (answer.status === 200) {
        show(await answer.json());
        seen = answer.headers.get("ETag");
      }
    } catch {
      $("lost").hidden = false;
    }
    setTimeout(refresh, 2000);
  }

  if ($("data").dataset.live === "yes") refresh();
  else show(JSON.parse($("data").textContent));
})();
