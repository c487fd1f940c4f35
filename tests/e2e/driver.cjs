// Headless Chromium for the tests, one page at a time. A JSON line in is [method, ...arguments] of the page, a JSON line out
// its result. "open" makes a page in a context of its own, "leave" closes it, "problems" returns what the page complained of.

const readline = require("node:readline");
const { chromium } = require("playwright-core");

async function main() {
  const browser = await chromium.launch({ executablePath: process.argv[2], args: ["--no-sandbox", "--disable-gpu"] });
  let context, page, problems;

  const commands = {
    async open(options) {
      context = await browser.newContext(options);
      page = await context.newPage();
      page.setDefaultTimeout(20_000);
      problems = [];
      page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
      page.on("pageerror", (error) => problems.push(String(error)));
    },
    leave: () => context.close(),
    problems: () => problems,
  };

  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [method, ...args] = JSON.parse(line);
    let reply;
    try {
      const result = await (commands[method] ? commands[method](...args) : page[method](...args));
      reply = { result: isPlain(result) ? result : null };
    } catch (error) {
      reply = { error: String(error) };
    }
    process.stdout.write(JSON.stringify(reply) + "\n");
  }
  await browser.close();
}

const isPlain = (value) =>
  value !== undefined && (value === null || typeof value !== "object" || Array.isArray(value) || value.constructor === Object);

main();
