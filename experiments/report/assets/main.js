// Start everything, in the order of the page.

startTradeoff();
startTable();
startPoint();
for (const [name, spec] of Object.entries(DATA.figures)) drawSpec(name, spec);
followWidth();
document.documentElement.dataset.ready = "yes";
