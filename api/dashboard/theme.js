// Sets the theme chosen in this browser before the first paint; the default is the system's.
const theme = localStorage.getItem("reasoner.theme");
if (theme) document.documentElement.dataset.theme = theme;
