// A page to try prompts. Text is shown as text, never as markup.
const $ = (id) => document.getElementById(id);
let turns = [];  // of the chat so far: {role, content}

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

// Add a turn to the page, and return the place of its text.
const show = (role, content) => {
  const turn = $("turns").appendChild(document.createElement("p"));
  turn.className = role;
  turn.appendChild(document.createElement("b")).textContent = role;
  return turn.appendChild(document.createTextNode(content));
};
const showAll = () => {
  $("turns").textContent = "";
  for (const {role, content} of turns) show(role, content);
};

// Post a request, give each piece of text to `take`, and return the reason for the end.
const stream = async (path, body, take) => {
  const answer = await fetch(path, {method: "POST", headers: headers(), body: JSON.stringify(body)});
  if (!answer.ok) throw new Error(await refusal(answer));
  if (!$("model").textContent) model();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", reason = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: {")) continue;
      const piece = JSON.parse(line.slice(6));
      if (piece.error) throw new Error(piece.error.message);
      const choice = piece.choices[0];
      take(choice.delta ? choice.delta.content || "" : choice.text);
      reason = choice.finish_reason || reason;
    }
  }
  if (!reason) throw new Error("The server ended before the text did.");
  return reason;
};

const chat = async (prompt, options) => {
  const system = $("system").value.trim();
  const messages = [...turns, {role: "user", content: prompt}];
  const all = system ? [{role: "system", content: system}, ...messages] : messages;
  show("user", prompt);
  const place = show("assistant", "");
  try {
    const reason = await stream("v1/chat/completions", {...options, messages: all},
                                (text) => place.appendData(text));
    turns = [...messages, {role: "assistant", content: place.data}];
    $("prompt").value = "";
    return reason;
  } finally { showAll(); }  // without the turns of a failed answer
};
const complete = async (prompt, options) => {
  const out = $("text");
  out.textContent = "";
  out.appendChild(document.createElement("b")).textContent = prompt;
  return stream("v1/completions", {...options, prompt}, (text) => out.append(text));
};

const write = async () => {
  const options = {max_tokens: Number($("max").value), stream: true};
  options.temperature = Number($("temperature").value);
  const begin = performance.now();
  const reason = await ($("chat").checked ? chat : complete)($("prompt").value, options);
  const seconds = ((performance.now() - begin) / 1000).toFixed(1);
  const ends = {length: "New tokens used up", stop: "The text has ended"};
  note((ends[reason] || reason) + ", " + seconds + " s.");
};
const switchKind = () => {
  const isChat = $("chat").checked;
  for (const id of ["system", "turns", "again"]) $(id).hidden = !isChat;
  $("text").hidden = isChat;
};

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  $("write").disabled = $("again").disabled = true;
  note("Writing …");
  try { await write(); }
  catch (error) { note(error.message, true); }
  finally { $("write").disabled = $("again").disabled = false; }
});
$("again").addEventListener("click", () => { turns = []; showAll(); note(""); });
$("chat").addEventListener("change", switchKind);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
switchKind();  // browsers keep the state of boxes
model().catch(() => {});
