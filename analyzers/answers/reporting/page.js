// Heads of columns sort; the link of the section that is read is marked. What is folded stays folded.
const SIZES = {ns: 1e-9, us: 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600, d: 86400,
  B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, kB: 1e3, MB: 1e6, GB: 1e9};
function worth(text) {
  const found = [...text.replaceAll("\u00a0", " ").replaceAll("\u2212", "-").matchAll(/([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?)\s*([A-Za-z]*)/g)];
  if (!found.length || /^[A-Za-z]{2}/.test(text)) return NaN;
  const first = found.filter(([, , unit], place) => !place || (unit in SIZES && SIZES[unit] < (SIZES[found[0][2]] ?? 0)));
  return first.reduce((sum, [, number, unit]) => sum + Number(number.replaceAll(",", "")) * (SIZES[unit] ?? 1), 0);
}
function sort(head) {
  const table = head.closest("table"), bodies = [...table.tBodies], sizes = bodies.map((body) => body.rows.length);
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const place = head.cellIndex, rows = bodies.flatMap((body) => [...body.rows]);
  const keyed = rows.map((row) => { const text = row.cells[place]?.textContent ?? ""; return {row, text, value: worth(text)}; });
  const sign = down ? -1 : 1;
  keyed.sort((a, b) => isNaN(a.value) || isNaN(b.value)
    ? (isNaN(a.value) - isNaN(b.value)) || sign * a.text.localeCompare(b.text) : sign * (a.value - b.value));
  bodies.forEach((body, at) => body.append(...keyed.splice(0, sizes[at]).map(({row}) => row)));
}
for (const head of document.querySelectorAll("thead th")) {
  if (head.closest("table").rows.length < 3) continue;
  head.setAttribute("role", "button");
  head.tabIndex = 0;
  head.title = "sort";
  head.addEventListener("click", () => sort(head));
  head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(head); });
}
const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) {
    for (const link of links.values()) link.classList.remove("here");
    links.get(entry.target.id)?.classList.add("here");
  }
}, {rootMargin: "-10% 0px -80% 0px"});
for (const section of document.querySelectorAll("main section")) seen.observe(section);
// A click on a point, or its name in the list, shows its command; where nothing may be copied it is marked to be copied by hand.
for (const box of document.querySelectorAll(".command")) {
  const [list, code, button] = ["select", "code", "button"].map((name) => box.querySelector(name));
  const at = Number(box.dataset.of.slice("chart-".length));
  globalThis.drawn?.then((charts) => {
    const {view} = charts[at];
    const show = (row) => {
      list.selectedIndex = row;
      code.textContent = list.value || "no command says this";
      button.textContent = "copy";
      view.signal("picked", row).runAsync();
    };
    list.addEventListener("change", () => show(list.selectedIndex));
    view.addEventListener("click", (event, item) => { if (item?.datum?.row !== undefined) show(item.datum.row); });
  });
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = document.execCommand("copy") ? "copied" : "press Ctrl+C";
    }
  });
}
