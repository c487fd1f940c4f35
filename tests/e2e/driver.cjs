// Drives one browser page for the tests: a JSON line in is [method, ...arguments] of the page, a JSON line out its result.
// Console errors and exceptions of the page are kept; the method "problems" returns them.

const readline = require("node:readline");
const { chromium } = require("playwright-core");

async function main() {
  const [endpoint, options] = [process.argv[2], JSON.parse(process.argv[3])];
  const browser = await chromium.connect(endpoint);
  const context = await browser.newContext(options);
  const page = await context.newPage();
  page.setDefaultTimeout(10_000);
  const problems = [];
  page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
  page.on("pageerror", (error) => problems.push(String(error)));

  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [method, ...args] = JSON.parse(line);
    let reply;
    try {
      const result = method === "problems" ? problems : await page[method](...args);
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
