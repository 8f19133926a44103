/* The page's own behaviour: theme, copying, sorting, printing. Everything but the picture works without it. */
(() => {
  "use strict";
  const still = matchMedia("(prefers-reduced-motion: reduce)"), darkly = matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement;
  const picture = document.getElementById("tl") ? timeline(JSON.parse(document.getElementById("data").textContent), still) : null;

  const button = document.getElementById("theme"), KEY = "gpudiag-theme";
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : darkly.matches);
  const paint = () => { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-label", "Switch to the " + (dark() ? "light" : "dark") + " theme"); if (picture) picture.repaint(); };
  try { const kept = localStorage.getItem(KEY); if (kept === "dark" || kept === "light") root.dataset.theme = kept; } catch { /* a file without storage keeps the system's theme */ }
  button.hidden = false; paint();
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; try { localStorage.setItem(KEY, root.dataset.theme); } catch { /* as above */ } paint(); });
  darkly.addEventListener("change", paint);

  async function copy(words) {
    try { await navigator.clipboard.writeText(words); return true; } catch { /* not allowed here: the old way */ }
    const area = document.createElement("textarea"); area.value = words; area.style.cssText = "position:fixed;opacity:0"; document.body.append(area); area.select();
    const done = document.execCommand("copy"); area.remove(); return done;
  }
  for (const b of document.querySelectorAll("button.copy")) b.addEventListener("click", async () => {
    const done = await copy(b.parentElement.querySelector("code").textContent);
    b.textContent = done ? "Copied" : "Press Ctrl+C"; b.focus(); setTimeout(() => { b.textContent = "Copy"; }, 1600);
  });

  for (const table of document.querySelectorAll("table.sortable")) table.querySelectorAll("thead th").forEach((head, column) => {
    const b = document.createElement("button"); b.type = "button"; b.textContent = head.textContent; head.replaceChildren(b);
    b.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") === "descending" || (!head.hasAttribute("aria-sort") && !head.classList.contains("num")), body = table.tBodies[0];
      const key = (row) => { const cell = row.cells[column]; return cell.dataset.v === undefined ? cell.textContent.trim() : Number(cell.dataset.v); };
      const rows = [...body.rows].sort((p, q) => { const a = key(p), z = key(q); return (typeof a === "number" ? a - z : a.localeCompare(z)) * (up ? 1 : -1); });
      for (const h of head.parentElement.cells) h.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending"); body.append(...rows);
    });
  });

  /* On paper nothing can be opened: the reasons are open, the long tables stay shut; and paper is light. */
  let before = null;
  addEventListener("beforeprint", () => {
    for (const d of document.querySelectorAll(".finding details")) d.open = true;
    before = root.dataset.theme || ""; root.dataset.theme = "light"; if (picture) picture.repaint();
  });
  addEventListener("afterprint", () => { if (before) root.dataset.theme = before; else delete root.dataset.theme; if (picture) picture.repaint(); });
})();
