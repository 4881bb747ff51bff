// The AI SDK with its provider for OpenAI-compatible servers. SERVER_URL takes anything; NARROW_URL wants a key.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "outrider",
  baseURL: `${process.env.SERVER_URL}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const greedy = { system: "Be brief.", temperature: 0, maxOutputTokens: 32, maxRetries: 0 };
const messages = [{ role: "user", content: [{ type: "text", text: "Where is " }, { type: "text", text: "Paris?" }] }];

for (const [kind, model, input] of [
  ["chat", provider.chatModel("tiny"), { messages }],
  ["completion", provider.completionModel("tiny"), { prompt: "Where is Paris?" }],
]) {
  test(`a streamed ${kind} is the whole one`, async () => {
    const whole = await generateText({ model, ...input, ...greedy });
    assert.ok(whole.text);
    const stream = streamText({ model, ...input, ...greedy, onError: ({ error }) => assert.fail(String(error)) });
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.equal(text, whole.text);
    assert.equal(await stream.finishReason, whole.finishReason);
    const usage = await stream.usage;
    assert.equal(usage.outputTokens, whole.usage.outputTokens);
    assert.equal(usage.inputTokens, whole.usage.inputTokens);
  });
}

const Weather = z.object({ sky: z.enum(["clear", "cloudy", "漢字"]), rain: z.boolean() });
const sampled = { system: "Be brief.", temperature: 1, maxOutputTokens: 400, maxRetries: 0, seed: 4 };

test("an object of a schema, whole and streamed", async () => {
  const asked = { model: provider.chatModel("tiny"), messages, ...sampled, output: Output.object({ schema: Weather }) };
  const { output } = await generateText(asked);
  assert.ok(Weather.parse(output));
  const stream = streamText({ ...asked, onError: ({ error }) => assert.fail(String(error)) });
  assert.deepEqual(await stream.output, output);
});

test("a tool is called, and the answer goes on with its result", async () => {
  const given = [];
  const report = tool({
    description: "Reports the weather.",
    inputSchema: Weather,
    execute: async (weather) => {
      given.push(Weather.parse(weather));
      return "thanks";
    },
  });
  const toolChoice = { type: "tool", toolName: "report" };
  const asked = { model: provider.chatModel("tiny"), messages, ...sampled, tools: { report }, toolChoice };
  const { steps } = await generateText({ ...asked, stopWhen: stepCountIs(2) });
  assert.equal(steps.length, 2);
  assert.equal(given.length, 2);
  assert.equal(steps[0].toolResults[0].output, "thanks");
  const stream = streamText({ ...asked, onError: ({ error }) => assert.fail(String(error)) });
  const calls = await stream.toolCalls;
  assert.deepEqual(calls.map(({ input }) => input), steps[0].toolCalls.map(({ input }) => input));
});

test("a refusal is an APICallError with the server's own words", async () => {
  await assert.rejects(
    generateText({ model: provider.chatModel("tiny"), messages, ...greedy, temperature: 9 }),
    (error) => APICallError.isInstance(error) && error.statusCode === 400 && /temperature/.test(error.message),
  );
});

test("a key that the server does not know is a 401", async () => {
  const stranger = createOpenAICompatible({ name: "outrider", baseURL: `${process.env.NARROW_URL}/v1`, apiKey: "no" });
  await assert.rejects(
    generateText({ model: stranger.chatModel("tiny"), messages, ...greedy }),
    (error) => APICallError.isInstance(error) && error.statusCode === 401,
  );
});
