"""A small page to try prompts. Text is shown as text, never as markup. The script is a separate
file, so that the page needs no inline code.
"""

HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>megatron-lightning</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="stylesheet" href="page.css"></head>
<body><header><h1>megatron-lightning</h1><span id="model"></span></header>
<form id="form"><textarea id="prompt" rows="5" placeholder="Prompt" autofocus required></textarea>
<div class="row"><label>New tokens <input id="max" type="number" value="64" min="1"></label>
<label>Temperature <input id="temperature" type="number" value="0.8" min="0" step="any"></label>
<label><input id="chat" type="checkbox"> Chat</label>
<label>API key <input id="key" type="password" autocomplete="off" placeholder="if set"></label>
<button id="write">Write</button></div></form>
<pre id="text" aria-live="polite"></pre><p id="note"></p>
<script src="page.js"></script></body></html>
"""

CSS = """:root { color-scheme: light dark; --line: #8884; --soft: #8881; --accent: #4f46e5 }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 54rem; margin: 2rem auto; padding: 0 1rem }
header { display: flex; align-items: baseline; gap: 1rem; margin-bottom: 1rem }
h1 { font-size: 1.4rem; margin: 0 } #model, #note { font-size: .9rem; opacity: .7 }
textarea, input { font: inherit; padding: .4rem .6rem; border: 1px solid var(--line);
  border-radius: .4rem; background: Field; color: FieldText }
textarea { width: 100%; font-family: ui-monospace, monospace; resize: vertical }
.row { display: flex; flex-wrap: wrap; align-items: center; gap: .8rem 1.4rem; margin: .8rem 0 }
label { display: flex; align-items: center; gap: .5rem }
input[type=number] { width: 5.5rem } input[type=password] { width: 8rem }
button { font: inherit; margin-left: auto; padding: .4rem 1.4rem; border: 0; border-radius: .4rem;
  background: var(--accent); color: white; cursor: pointer } button:disabled { opacity: .5 }
pre { font: 15px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  background: var(--soft); border: 1px solid var(--line); border-radius: .4rem; padding: 1rem }
pre:empty { display: none } pre b { font-weight: 600; color: var(--accent) }
#note.error { color: #dc2626; opacity: 1 }
"""

JAVASCRIPT = """const $ = (id) => document.getElementById(id);
const note = (text, isError) => {
  $("note").textContent = text;
  $("note").className = isError ? "error" : "";
};
const headers = () => {
  const key = $("key").value, plain = {"Content-Type": "application/json"};
  return key ? {...plain, Authorization: "Bearer " + key} : plain;
};
const model = async () => {  // with a key the name is known after the first text
  const answer = await fetch("v1/models", {headers: headers()});
  if (!answer.ok) return;
  const {id, max_model_len} = (await answer.json()).data[0];
  $("model").textContent = id + ", up to " + max_model_len + " tokens";
};
const refusal = async (answer) => {
  try { return (await answer.json()).error.message; }
  catch { return "The server answered " + answer.status + " " + answer.statusText; }
};
const write = async () => {
  const chat = $("chat").checked, prompt = $("prompt").value, out = $("text");
  const body = {max_tokens: Number($("max").value), stream: true};
  body.temperature = Number($("temperature").value);
  if (chat) body.messages = [{role: "user", content: prompt}];
  else body.prompt = prompt;
  out.textContent = "";
  const begin = performance.now();
  const answer = await fetch(chat ? "v1/chat/completions" : "v1/completions",
                             {method: "POST", headers: headers(), body: JSON.stringify(body)});
  if (!answer.ok) throw new Error(await refusal(answer));
  if (!$("model").textContent) model();
  if (!chat) out.appendChild(document.createElement("b")).textContent = prompt;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", reason = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\\n\\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: {")) continue;
      const piece = JSON.parse(line.slice(6));
      if (piece.error) throw new Error(piece.error.message);
      const choice = piece.choices[0];
      out.append(chat ? (choice.delta.content || "") : choice.text);
      reason = choice.finish_reason || reason;
    }
  }
  if (!reason) throw new Error("The server ended before the text did.");
  const seconds = ((performance.now() - begin) / 1000).toFixed(1);
  const ends = {length: "New tokens used up", stop: "The text has ended"};
  note((ends[reason] || reason) + ", " + seconds + " s.");
};
$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  $("write").disabled = true;
  note("Writing …");
  try { await write(); }
  catch (error) { note(error.message, true); }
  finally { $("write").disabled = false; }
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
model().catch(() => {});
"""
