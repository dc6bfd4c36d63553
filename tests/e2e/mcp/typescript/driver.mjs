// Drives a client by orders on stdin, and tells on stdout what its caller sees: a JSON line each.

import { createInterface } from "node:readline";

/** Where to connect to and how, as the test gives it: `url`, `headers`, `mode`, `keepsSessionId`. */
export const target = JSON.parse(process.argv[2]);

const SESSION_ID_HEADER = "mcp-session-id";
const exchanges = [];

/** Fetch, and note it; each time over a connection of its own, which any worker may accept. */
export async function watchedFetch(url, init) {
  const headers = new Headers(init.headers);
  const exchange = { method: init.method, sessionId: headers.get(SESSION_ID_HEADER), status: null };
  exchanges.push(exchange);
  headers.set("connection", "close");
  const response = await fetch(url, { ...init, headers });
  exchange.status = response.status;
  if (target.keepsSessionId || response.body === null) return response;
  const kept = new Headers(response.headers);
  kept.delete(SESSION_ID_HEADER);
  return new Response(response.body, { status: response.status, headers: kept });
}

function seen({ constructor, message, data }) {
  return { type: constructor.name, message, data };
}

/**
 * Answer orders, each as soon as it is done, until stdin ends.
 *
 * @param client The client.
 * @param transport What it connects by.
 * @param differences What the major versions of the SDK do each in its own way.
 */
export async function drive(client, transport, { callTool, version }) {
  let lastCall;
  const orders = {
    connect: async () => {
      await client.connect(transport);
      return { sessionId: transport.sessionId ?? null, version: version() };
    },
    list: () => client.listTools(),
    ping: () => client.ping(),
    call: ({ name, given, timeout }) => {
      lastCall = new AbortController();
      return callTool({ name, arguments: given }, { signal: lastCall.signal, timeout });
    },
    abort: async () => lastCall.abort("no longer wanted"),
    terminate: () => transport.terminateSession(),
    exchanges: async () => exchanges,
  };

  for await (const line of createInterface({ input: process.stdin })) {
    const { order, number, ...details } = JSON.parse(line);
    const began = performance.now();
    const answer = (outcome) => {
      const ms = performance.now() - began;
      process.stdout.write(`${JSON.stringify({ number, ms, ...outcome })}\n`);
    };
    orders[order](details).then(
      (result) => answer({ result: result ?? null }),
      (error) => answer({ error: seen(error) }),
    );
  }
  await client.close();
}
