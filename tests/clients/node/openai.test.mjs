// The openai package for Node: all endpoints, streams, errors, retries. SERVER_URL takes anything; NARROW_URL has a key
// (NARROW_KEY) and room for two sequences.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = "tiny";
const messages = [{ role: "user", content: "Where is 漢字?" }];
const greedy = { model, temperature: 0, max_tokens: 24 };
const client = new OpenAI({ baseURL: `${process.env.SERVER_URL}/v1`, apiKey: "none", maxRetries: 0 });

function narrowClient(options) {
  const baseURL = `${process.env.NARROW_URL}/v1`;
  return new OpenAI({ baseURL, apiKey: process.env.NARROW_KEY, maxRetries: 0, ...options });
}

test("models", async () => {
  const ids = [];
  for await (const each of client.models.list()) ids.push(each.id);
  assert.deepEqual(ids, [model]);
  assert.equal((await client.models.retrieve(model)).owned_by, "outrider");
});

test("completions in four prompt shapes", async () => {
  for (const prompt of ["Hi", ["Hi", "Sam"], [70, 71, 72], [[70, 71], [72]]]) {
    const answer = await client.completions.create({ ...greedy, prompt, n: 2, seed: 7, logprobs: 2 });
    const prompts = Array.isArray(prompt) && typeof prompt[0] !== "number" ? prompt.length : 1;
    assert.deepEqual(answer.choices.map((choice) => choice.index), [...Array(prompts * 2).keys()]);
    for (const choice of answer.choices) {
      assert.equal(choice.logprobs.tokens.length, choice.logprobs.token_logprobs.length);
    }
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  }
});

test("a streamed completion is the whole one", async () => {
  const asked = { ...greedy, prompt: "Sam has 12", max_tokens: 64 };
  const whole = await client.completions.create(asked);
  const stream = await client.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
  let text = "";
  let usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.text ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].text);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

test("a streamed chat is the whole one, through the client's own accumulator", async () => {
  const asked = { ...greedy, messages, max_tokens: 64, logprobs: true, top_logprobs: 2 };
  const whole = await client.chat.completions.create(asked);
  const runner = client.chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
  const final = await runner.finalChatCompletion();
  assert.equal(final.choices[0].message.role, "assistant");
  assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
  assert.equal(final.choices[0].finish_reason, whole.choices[0].finish_reason);
  assert.equal(final.usage.total_tokens, whole.usage.total_tokens);
  assert.equal(final.choices[0].logprobs.content.length, whole.choices[0].logprobs.content.length);
});

test("raw answers carry the request id that was sent", async () => {
  const options = { headers: { "X-Request-Id": "node-7" } };
  const { data, response, request_id } = await client.chat.completions
    .create({ ...greedy, messages }, options)
    .withResponse();
  assert.equal(response.headers.get("x-request-id"), "node-7");
  assert.equal(request_id, "node-7");
  assert.equal(data.object, "chat.completion");
});

test("errors are of the client's own classes", async () => {
  const tooWarm = await caught(client.chat.completions.create({ model, messages, temperature: 3 }));
  assert.ok(tooWarm instanceof OpenAI.BadRequestError);
  assert.equal(tooWarm.param, "temperature");
  assert.equal(tooWarm.type, "invalid_request_error");
  assert.ok(tooWarm.requestID);
  const other = await caught(client.completions.create({ model: "other", prompt: "Hi" }));
  assert.ok(other instanceof OpenAI.NotFoundError);
  assert.equal(other.code, "model_not_found");
  const stranger = narrowClient({ apiKey: "wrong" });
  assert.ok((await caught(stranger.models.list())) instanceof OpenAI.AuthenticationError);
});

test("leaving a stream early leaves the server free", async () => {
  const stream = await client.completions.create({ model, prompt: "Hi", max_tokens: 20000, stream: true, seed: 1 });
  for await (const _ of stream) break;
  assert.ok(stream.controller.signal.aborted);
});

test("a 429 is tried again until there is room", async () => {
  const long = { model, prompt: "Hi", n: 2, max_tokens: 20000, stream: true, ignore_eos: true };
  const holder = await narrowClient({ maxRetries: 10 }).completions.create(long);
  const { done } = await holder[Symbol.asyncIterator]().next();
  assert.equal(done, false);
  const refused = await caught(narrowClient().completions.create({ ...greedy, prompt: "Hi" }));
  assert.ok(refused instanceof OpenAI.RateLimitError);
  assert.equal(refused.code, "queue_full");
  assert.ok(Number(refused.headers.get("retry-after")) >= 1);
  const statuses = [];
  const counting = async (...request) => {
    const response = await fetch(...request);
    statuses.push(response.status);
    if (response.status === 429) holder.controller.abort();
    return response;
  };
  const answer = await narrowClient({ maxRetries: 10, fetch: counting }).completions.create({ ...greedy, prompt: "Hi" });
  assert.ok(answer.usage.completion_tokens > 0);
  assert.equal(statuses[0], 429);
  assert.equal(statuses.at(-1), 200);
});

const Weather = z.object({ sky: z.enum(["clear", "cloudy", "漢字"]), rain: z.boolean() });
const structured = { model, messages, temperature: 1, max_tokens: 400, seed: 4 };

test("an answer that its helper for zod parses, whole and streamed", async () => {
  const asked = { ...structured, response_format: zodResponseFormat(Weather, "weather") };
  const whole = await client.chat.completions.parse(asked);
  assert.ok(Weather.parse(whole.choices[0].message.parsed));
  const final = await client.chat.completions.stream(asked).finalChatCompletion();
  assert.deepEqual(final.choices[0].message.parsed, whole.choices[0].message.parsed);
});

test("a tool call that is enforced, and its result sent back", async () => {
  const tools = [zodFunction({ name: "report", parameters: Weather })];
  const asked = { ...structured, tools, tool_choice: "required", parallel_tool_calls: false };
  const whole = await client.chat.completions.parse(asked);
  assert.equal(whole.choices[0].finish_reason, "tool_calls");
  const [call] = whole.choices[0].message.tool_calls;
  assert.equal(call.function.name, "report");
  assert.ok(Weather.parse(call.function.parsed_arguments));
  const final = await client.chat.completions.stream(asked).finalChatCompletion();
  assert.deepEqual(
    final.choices[0].message.tool_calls.map((each) => JSON.parse(each.function.arguments)),
    whole.choices[0].message.tool_calls.map((each) => JSON.parse(each.function.arguments)),
  );
  const results = whole.choices[0].message.tool_calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: "42" }));
  const { role, content, tool_calls } = whole.choices[0].message;
  const talk = [...messages, { role, content, tool_calls }, ...results];
  const next = await client.chat.completions.create({ ...structured, messages: talk, tools, max_tokens: 8 });
  assert.ok(next.usage.prompt_tokens > whole.usage.prompt_tokens);
});

async function caught(promise) {
  try {
    await promise;
  } catch (error) {
    return error;
  }
  assert.fail("no error was raised");
}
