// The little markdown that chat answers use: fenced code, inline code, bold. Builds nodes from text, never from HTML.

const FENCE = /^```[^\n`]*$/;
const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*)/;

/** Replace the children of `element` by `text`, rendered. */
export function renderMarkdown(element, text) {
  element.replaceChildren(...splitBlocks(text).map(toNode));
}

/** Split at fences into {isCode, text}; a fence that is still open runs to the end. */
function splitBlocks(text) {
  const blocks = [];
  let block = { isCode: false, lines: [] };
  for (const line of text.split("\n")) {
    const isFence = block.isCode ? line.trim() === "```" : FENCE.test(line.trim());
    if (!isFence) {
      block.lines.push(line);
      continue;
    }
    blocks.push(block);
    block = { isCode: !block.isCode, lines: [] };
  }
  blocks.push(block);
  return blocks
    .map(({ isCode, lines }) => ({ isCode, text: isCode ? lines.join("\n") : lines.join("\n").replace(/^\n+|\n+$/g, "") }))
    .filter(({ isCode, text }) => isCode || text !== "");
}

function toNode({ isCode, text }) {
  if (isCode) {
    const frame = document.createElement("pre");
    frame.tabIndex = 0; // scrolls sideways, so the keyboard must reach it
    frame.append(withText("code", text));
    return frame;
  }
  const paragraph = document.createElement("div");
  for (const piece of text.split(INLINE)) {
    if (piece.startsWith("`") && piece.length > 2 && piece.endsWith("`")) paragraph.append(withText("code", piece.slice(1, -1)));
    else if (piece.startsWith("**") && piece.length > 4 && piece.endsWith("**")) paragraph.append(withText("strong", piece.slice(2, -2)));
    else paragraph.append(piece);
  }
  return paragraph;
}

function withText(name, text) {
  const element = document.createElement(name);
  element.textContent = text;
  return element;
}
