// Of every report: the colours' button and tables that can be sorted.

const byId = (id) => document.getElementById(id);

function stored(name, value) {
  // A page from a file may have no storage.
  try {
    if (value === undefined) return localStorage.getItem(name);
    localStorage.setItem(name, value);
  } catch { /* the choice is not kept */ }
  return null;
}

{
  const themes = ["automatic", "light", "dark"];
  const button = byId("theme");
  const set = (theme) => {
    if (theme === "automatic") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Colours: ${theme}`;
    button.setAttribute("aria-label", `Colours: ${theme}. Change`);
    document.dispatchEvent(new Event("theme"));
  };
  let theme = stored("liteattention-report-theme");
  if (!themes.includes(theme)) theme = "automatic";
  set(theme);
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    stored("liteattention-report-theme", theme);
    set(theme);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => set(theme));
}

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      // Figures begin with the largest, text with A.
      const text = head.classList.contains("text");
      const first = text ? "ascending" : "descending";
      const second = text ? "descending" : "ascending";
      const order = head.getAttribute("aria-sort") === first ? second : first;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const value = (row) => row.cells[column].dataset.value;
      const compare = (a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
        const difference = Number(x) - Number(y);
        return sign * (Number.isNaN(difference) ? x.localeCompare(y, "en", { numeric: true }) : difference);
      };
      body.append(...[...body.rows].sort(compare));
    });
  });
}
