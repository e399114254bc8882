// Runs before anything is drawn, so that a chosen theme does not flash. Not a module: those wait for the document.
"use strict";
try {
  const theme = localStorage.getItem("postrider.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // No storage: the system's theme it is.
}
