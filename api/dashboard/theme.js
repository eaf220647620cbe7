// Before the first paint: the theme that this browser was left in. Without one, the system's.
const theme = localStorage.getItem("reasoner.theme");
if (theme) document.documentElement.dataset.theme = theme;
