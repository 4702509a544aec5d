// Before the first paint: the theme that was chosen here, otherwise the system's.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("penstock.theme");
  } catch {
    // Storage is switched off.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
