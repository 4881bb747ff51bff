// The page at /, in a real browser: a question, tokens tinted by who made them, living figures.
import assert from "node:assert/strict";
import { test } from "node:test";
import { chromium } from "playwright-core";

const URL = process.env.SERVER_URL;

async function opened(use) {
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM,
    args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
      "--disable-component-update", "--disable-sync"],
  });
  try {
    const page = await browser.newPage();
    const faults = [], asked = [];
    page.on("pageerror", error => faults.push(String(error)));
    page.on("console", message => message.type() === "error" && faults.push(message.text()));
    page.on("request", request => asked.push(request.url()));
    await page.goto(URL + "/");
    await page.waitForFunction(() => document.querySelectorAll("#rows tr").length > 0);
    await use(page, asked);
    // What the server refuses on purpose, Chromium logs as well.
    assert.deepEqual(faults.filter(fault => !fault.includes("favicon") && !fault.includes("status of 400")), []);
    assert.deepEqual(asked.filter(url => !url.startsWith(URL)), []);
  } finally {
    await browser.close();
  }
}

async function ask(page, text, { k, mode = "completion", tokens = 24 }) {
  await page.selectOption("#mode", mode);
  await page.fill("#k", String(k));
  await page.fill("#most", String(tokens));
  await page.fill("#text", text);
  await page.keyboard.press("Control+Enter");
  await page.waitForFunction(() => !document.querySelector("#send").disabled, undefined, { timeout: 120000 });
}

test("tokens are tinted by how they were made, and acceptance lives", async () => {
  await opened(async page => {
    const k = Number(await page.getAttribute("#k", "max"));
    assert.ok(k > 0, "the server speculates");
    assert.equal(await page.locator("#bars .bar").count(), k);
    await ask(page, "abc", { k });
    assert.ok(await page.locator(".token").count() > 0);
    assert.ok(await page.locator(".token.p").count() > 0, "some tokens were drafted");
    assert.match(await page.locator(".token.p").first().getAttribute("title"), /drafted at position 0\n+log-probability/);
    assert.match(await page.textContent("#answer"), /acceptance length/);
    await page.waitForFunction(() => /\d+ % of \d+/.test(document.querySelector("#bars").textContent));
    if (process.env.SCREENSHOT) await page.screenshot({ path: process.env.SCREENSHOT, fullPage: true });
  });
});

test("without drafts the same text, by the target alone", async () => {
  await opened(async page => {
    const k = Number(await page.getAttribute("#k", "max"));
    const texts = [];
    for (const most of [0, k]) {
      await ask(page, "same", { k: most });
      const answer = page.locator(".turn").last();
      texts.push(await answer.innerText());
      assert.equal(await answer.locator(".token.p").count() > 0, most > 0);
      await page.click("#clear");
    }
    assert.equal(texts[0], texts[1]);
  });
});

test("a turn that failed is taken out of the conversation", async () => {
  await opened(async page => {
    const history = () => page.evaluate(() => state.history.map(turn => turn.role));
    await ask(page, "far too long ".repeat(20000), { k: 0, mode: "chat", tokens: 4 });
    assert.equal(await page.locator(".error").count(), 1);
    assert.deepEqual(await history(), []);
    for (const turns of [1, 2]) {
      await ask(page, "short", { k: 0, mode: "chat", tokens: 4 });
      assert.equal(await page.locator(".error").count(), 1);
      assert.deepEqual(await history(), Array(turns).fill(["user", "assistant"]).flat());
    }
  });
});

test("figures come from vLLM's names where the server shows no others", async () => {
  await opened(async page => {
    await page.route("**/metrics", async route => {
      const response = await route.fetch();
      const lines = (await response.text()).split("\n").filter(line => !line.includes("outrider_"));
      lines.push('vllm:num_requests_waiting{engine="0",model_name="tiny"} 7.0', "");
      await route.fulfill({ response, body: lines.join("\n") });
    });
    await page.waitForFunction(() => /\d, 7/.test(document.querySelector("#server").textContent));
  });
});

test("errors are shown, and a stream can be stopped by keyboard", async () => {
  await opened(async page => {
    await page.fill("#temperature", "3");
    await ask(page, "x", { k: 0 });
    assert.match(await page.locator(".error").last().innerText(), /temperature/);
    await page.fill("#temperature", "0");
    await page.fill("#most", "600");
    await page.fill("#text", "y");
    await page.keyboard.press("Control+Enter");
    await page.waitForFunction(() => document.querySelectorAll(".token").length > 3);
    await page.keyboard.press("Escape");
    await page.waitForFunction(() => !document.querySelector("#send").disabled);
    assert.equal(await page.locator(".error").count(), 1);
  });
});
