// Starts headless Chromium for all tests and prints where it can be reached; ends with its standard input.

const { chromium } = require("playwright-core");

async function main() {
  const server = await chromium.launchServer({ executablePath: process.argv[2], args: ["--no-sandbox", "--disable-gpu"] });
  process.stdout.write(server.wsEndpoint() + "\n");
  for await (const _ of process.stdin);
  await server.close();
}

main();
