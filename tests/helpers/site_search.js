// Asks the search worker of a built site, as its pages do: node site_search.js SITE, queries as JSON on stdin, pages on stdout.
const fs = require("fs"), path = require("path"), vm = require("vm");
const site = process.argv[2], workers = path.join(site, "assets/javascripts/workers");
const worker = fs.readdirSync(workers).find((name) => /^search.*\.js$/.test(name));
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
let ask, answer;
const world = { console, setTimeout, addEventListener: (_, listener) => { ask = listener; }, postMessage: (said) => answer(said) };
world.self = world.window = world.parent = world;
vm.runInNewContext(fs.readFileSync(path.join(workers, worker), "utf8"), world);
const send = (type, data) => new Promise((done) => { answer = done; ask({ data: { type, data } }); });
(async () => {
  await send(0, { config: index.config, docs: index.docs, options: { suggest: false } });
  const found = {};
  for (const query of JSON.parse(fs.readFileSync(0, "utf8"))) {
    const { data } = await send(2, query);
    found[query] = data.items.map((results) => results[0].location.split("#")[0]).filter((page, at, all) => all.indexOf(page) === at);
  }
  console.log(JSON.stringify(found));
})();
