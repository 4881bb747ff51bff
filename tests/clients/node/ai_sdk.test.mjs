// The AI SDK with its provider for OpenAI-compatible servers. SERVER_URL takes anything; NARROW_URL wants a key.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText } from "ai";

const provider = createOpenAICompatible({
  name: "outrider",
  baseURL: `${process.env.SERVER_URL}/v1`,
  includeUsage: true,
});
const greedy = { temperature: 0, maxOutputTokens: 32, maxRetries: 0 };
const messages = [
  { role: "system", content: "Be brief." },
  { role: "user", content: [{ type: "text", text: "Where is " }, { type: "text", text: "Paris?" }] },
];

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
