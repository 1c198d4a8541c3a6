"""The page at `/` of `gristmill serve`: talks to the model through the server's own API, offline, as text alone."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>gristmill</title><link rel="stylesheet" href="chat.css"></head><body>
<main>
<h1 id="model">gristmill</h1>
<details><summary>Settings</summary>
<label>Mode <select id="mode"><option value="chat">chat</option>
<option value="text">continue a text</option></select></label>
<label>System prompt <textarea id="system" rows="2"></textarea></label>
<label>Temperature <input id="temperature" type="number" min="0" max="2" step="0.1" value="0.7"></label>
<label>Tokens, at most <input id="tokens" type="number" min="1" value="200"></label>
<label>Token of the server, if it has one <input id="key" type="password" autocomplete="off"></label>
</details>
<div id="talk" aria-live="polite"></div>
<form id="ask"><textarea id="said" rows="3" aria-label="Message" placeholder="Enter sends, Shift and Enter begin a line"
autofocus></textarea>
<p><button id="send">Send</button> <button id="stop" type="button" disabled>Stop</button>
<button id="clear" type="button">New conversation</button> <span id="status" role="status"></span></p></form>
</main><script src="chat.js"></script></body></html>
"""

STYLE = """:root { color-scheme: light dark; --line: #8884; --own: #8882; --faint: light-dark(#555, #aaa); }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0; background: light-dark(#fff, #161616);
  color: light-dark(#1a1a1a, #e6e6e6); }
main { max-width: 46rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.1rem; overflow-wrap: anywhere; }
textarea, input, select, button { font: inherit; color: inherit; }
textarea { width: 100%; box-sizing: border-box; }
label { display: block; margin: .4rem 0; }
.turn { white-space: pre-wrap; overflow-wrap: anywhere; margin: .8rem 0; padding: .5rem .8rem;
  border: 1px solid var(--line); border-radius: .5rem; }
.user { background: var(--own); }
.error { border-color: light-dark(#b00020, #ff8a80); }
.turn span:hover { background: light-dark(#ffe08a, #6b5300); }
#status { color: var(--faint); }
"""

# Replies are put into the page as text nodes: nothing of them is ever read as HTML.
SCRIPT = r"""'use strict';
const at = (id) => document.getElementById(id);
let messages = [], running = null;

function headers() {
  const key = at('key').value;
  return {'Content-Type': 'application/json', ...(key ? {Authorization: `Bearer ${key}`} : {})};
}

function turn(kind, text) {
  const element = document.createElement('div');
  element.className = `turn ${kind}`;
  element.textContent = text;
  at('talk').append(element);
  element.scrollIntoView({block: 'end'});
  return element;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const parts = (rest + value).split('\n\n');
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, '');
      if (data === '[DONE]') return;
      yield JSON.parse(data);
    }
  }
}

function body(text) {
  const common = {max_tokens: Number(at('tokens').value), temperature: Number(at('temperature').value), stream: true,
    stream_options: {include_usage: true}};
  if (at('mode').value === 'text') return {...common, prompt: text, logprobs: 3};
  const system = at('system').value ? [{role: 'system', content: at('system').value}] : [];
  return {...common, messages: [...system, ...messages], logprobs: true, top_logprobs: 3};
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

// Log-probabilities come with each piece.
function joined(before, more) {
  if (!before || !more) return before ?? more;
  const lists = Object.keys(before).filter((name) => Array.isArray(before[name]));
  return Object.fromEntries(lists.map((name) => [name, [...before[name], ...more[name]]]));
}

// The reply's tokens as one span each, with their probability and the likeliest others on hover.
function annotate(element, logprobs) {
  const rows = logprobs.content
    ? logprobs.content.map((t) => [t.token, t.logprob, t.top_logprobs.map((o) => [o.token, o.logprob])])
    : logprobs.tokens.map((t, k) => [t, logprobs.token_logprobs[k], Object.entries(logprobs.top_logprobs?.[k] ?? {})]);
  if (rows.map((row) => row[0]).join('') !== element.textContent) return;  // halves of characters, cut stop texts
  element.replaceChildren(...rows.map(([token, logprob, others]) => {
    const span = document.createElement('span');
    span.textContent = token;
    span.title = [percent(logprob), ...others.map(([text, p]) => `${JSON.stringify(text)} ${percent(p)}`)].join('\n');
    return span;
  }));
}

async function send(text) {
  const chat = at('mode').value === 'chat';
  turn('user', text);
  if (chat) messages.push({role: 'user', content: text});
  const reply = turn('assistant', ''), begun = performance.now();
  running = new AbortController();
  at('send').disabled = true;
  at('stop').disabled = false;
  let logprobs = null, seconds = 0;
  try {
    const path = chat ? 'v1/chat/completions' : 'v1/completions';
    const response = await fetch(path, {method: 'POST', headers: headers(), body: JSON.stringify(body(text)),
      signal: running.signal});
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      seconds = (performance.now() - begun) / 1000;
      for (const choice of event.choices) {
        reply.textContent += (chat ? choice.delta.content : choice.text) ?? '';
        logprobs = joined(logprobs, choice.logprobs);
      }
      if (event.usage) {
        const count = event.usage.completion_tokens;
        at('status').textContent = `${count} tokens, ${(count / seconds).toFixed(1)} a second`;
      }
    }
    if (logprobs) annotate(reply, logprobs);
  } catch (error) {
    if (error.name !== 'AbortError') { reply.classList.add('error'); reply.textContent += error.message; }
  }
  if (chat && !reply.classList.contains('error')) messages.push({role: 'assistant', content: reply.textContent});
  else if (chat) messages.pop();
  running = null;
  at('send').disabled = false;
  at('stop').disabled = true;
}

at('ask').addEventListener('submit', (event) => {
  event.preventDefault();
  const text = at('said').value;
  if (!text || running) return;
  at('said').value = '';
  send(text);
});
at('said').addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at('ask').requestSubmit();
  }
});
at('stop').addEventListener('click', () => running?.abort());
at('clear').addEventListener('click', () => {
  messages = [];
  at('talk').replaceChildren();
  at('status').textContent = '';
});

fetch('v1/models', {headers: headers()}).then((r) => r.json()).then((models) => {
  at('model').textContent = models.data[0].id;
}).catch(() => {});
"""
