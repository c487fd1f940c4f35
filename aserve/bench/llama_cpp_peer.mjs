// llama.cpp in a speed comparison, through node-llama-cpp; speaks the lines that speed_peer.py describes.
// node llama_cpp_peer.mjs MODEL THREADS, with node-llama-cpp installed in the working folder.
import {createRequire} from "node:module";
import path from "node:path";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const [modelPath, threads] = [process.argv[2], Number(process.argv[3])];
const resolve = createRequire(path.join(process.cwd(), "package.json")).resolve;
const {getLlama} = await import(pathToFileURL(resolve("node-llama-cpp")));
const llama = await getLlama({gpu: false, maxThreads: threads, build: "never", logLevel: "error"});
const model = await llama.loadModel({modelPath, gpuLayers: 0});
const contexts = new Map(); // number of streams -> a context with as many sequences

async function openSequences(count, length) {
    if (!contexts.has(count)) {
        const context = await model.createContext({
            contextSize: length,
            sequences: count,
            threads,
            batchSize: 2048
        });
        contexts.set(count, Array.from({length: count}, () => context.getSequence()));
    }
    const sequences = contexts.get(count);
    for (const sequence of sequences) await sequence.clearHistory(); // nothing of an earlier prompt is reused
    return sequences;
}

async function complete(sequence, prompt, outputLength) {
    let count = 0;
    for await (const _ of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true}))
        if (++count === outputLength) break;
    return count;
}

function answer(message) {
    process.stdout.write(JSON.stringify(message) + "\n");
}

answer({});
for await (const line of createInterface({input: process.stdin})) {
    const {prompts, output_len: outputLength} = JSON.parse(line);
    const sequences = await openSequences(prompts.length, prompts[0].length + outputLength + 8);
    const start = performance.now();
    const counts = await Promise.all(prompts.map((prompt, i) => complete(sequences[i], prompt, outputLength)));
    answer({seconds: (performance.now() - start) / 1000, num_tokens: counts.reduce((sum, count) => sum + count, 0)});
}
await llama.dispose();
