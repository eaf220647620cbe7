// Requests whose failures the page shows, and the prompt for an API key.

import { byId, write } from "./dom.js";
import { Refusal, key } from "./service.js";

/** Runs a request; shows its failure, or the prompt for a missing key. Returns nothing then. */
export async function attempt(action) {
  try {
    const answer = await action();
    write(byId("notice"), "");
    return answer;
  } catch (error) {
    if (error instanceof Refusal && error.status === 401) askForKey();
    else write(byId("notice"), error instanceof Refusal ? error.message : "The service does not answer; trying again.");
    return undefined;
  }
}

/** Returns the answer of a request, or its refusal if the request is wrong or not allowed; other failures are shown. */
export function attemptOrRefuse(action) {
  return attempt(async () => {
    try {
      return await action();
    } catch (error) {
      if (error instanceof Refusal && [400, 403, 404, 422].includes(error.status)) return error;
      throw error;
    }
  });
}

/** Asks before an action that cannot be undone. */
export function confirmAction(title, text, yes) {
  const dialog = byId("sure-dialog");
  write(byId("sure-title"), title);
  write(byId("sure-text"), text);
  write(dialog.querySelector("[type=submit]"), yes);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

function askForKey() {
  const dialog = byId("keys");
  write(dialog.querySelector(".refused"), key.get() ? "That key is not one of this service's." : "");
  if (!dialog.open) dialog.showModal();
  byId("forget").hidden = true;
}

/** Wires the prompt for a key; `begin` runs with each new one. */
export function wireKeys(begin) {
  byId("keys").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = byId("key").value.trim();
    if (!given) return;
    key.set(given);
    byId("key").value = "";
    byId("keys").close();
    begin();
  });
  byId("forget").addEventListener("click", () => {
    key.forget();
    location.reload();
  });
  byId("sure-dialog").addEventListener("submit", (event) => {
    event.preventDefault();
    byId("sure-dialog").close("yes");
  });
}
