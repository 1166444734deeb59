// speedscope.mjs DIRECTORY OUT SPAN=FUNCTION...: opens each span's .pb.gz of the directory in the speedscope of
// OUT/node_modules with the installed Chromium, and checks that the page shows more than half of the time in the
// function or its callees. Screenshots go to OUT.

import fs from "node:fs";
import http from "node:http";
import os from "node:os";
import path from "node:path";
import { createRequire } from "node:module";

const [directory, out, ...wanted] = process.argv.slice(2);
const require = createRequire(path.resolve(out, "package.json"));
const { chromium } = require("playwright-core");
const speedscope = path.resolve(out, "node_modules/speedscope/dist/release");

/** What the page asks for: speedscope itself, and the profile as /profile. */
function serve(profile) {
    const types = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".wasm": "application/wasm" };
    const server = http.createServer((request, response) => {
        const name = new URL(request.url, "http://localhost").pathname;
        const file = name === "/profile" ? profile : path.join(speedscope, path.normalize(name));
        if (!fs.existsSync(file)) {
            response.writeHead(404).end();
            return;
        }
        response.writeHead(200, { "content-type": types[path.extname(file)] ?? "application/octet-stream" });
        response.end(fs.readFileSync(file));
    });
    return new Promise((done) => server.listen(0, "127.0.0.1", () => done(server)));
}

/** The share of the time, with what it calls, that the table of functions gives this one. */
async function shareOf(page, wanted) {
    const rows = await page.locator("tr").allInnerTexts();
    // `1.05s (100%)`, `999ms (>99%)`, `0ns (0%)`, and the name.
    const row = rows.find((row) => row.includes(wanted));
    const share = row?.match(/\([<>]?([\d.]+)%\)/)?.[1];
    return { share: Number(share ?? 0), rows };
}

async function check(context, span, wanted) {
    const files = fs.readdirSync(directory).filter((name) => name.includes(`-${span}-`) && name.endsWith(".pb.gz"));
    if (files.length !== 1) {
        throw new Error(`${files.length} files of ${span}`);
    }
    const server = await serve(path.join(directory, files[0]));
    const page = await context.newPage();
    const errors = [];
    page.on("pageerror", (error) => errors.push(`${error}`));
    page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
    page.on("dialog", (dialog) => {
        errors.push(dialog.message());
        dialog.dismiss();
    });
    try {
        const query = `profileURL=${encodeURIComponent("/profile")}&title=${encodeURIComponent(span)}`;
        await page.goto(`http://127.0.0.1:${server.address().port}/index.html#${query}`);
        // The graphs are drawn on a canvas; the table of functions is text.
        await page.getByText("Sandwich").click({ timeout: 30_000 });
        const total = page.getByText("Total", { exact: true });
        await total.click();
        const { share, rows } = await shareOf(page, wanted);
        await page.screenshot({ path: path.join(out, `${span}-functions.png`) });
        await page.getByText("Left Heavy").click();
        // Nothing in the page shows when the drawing is complete.
        await page.waitForTimeout(1000);
        await page.screenshot({ path: path.join(out, `${span}.png`) });
        console.log(`${span}: speedscope shows ${share} % in ${wanted}`);
        if (!(share > 50)) {
            throw new Error(`not found in\n${rows.join("\n")}`);
        }
    } catch (error) {
        throw new Error([error.message, ...errors].join("\n"));
    } finally {
        await page.close();
        server.close();
    }
    if (errors.length > 0) {
        throw new Error(errors.join("\n"));
    }
}

// A new directory for the browser's data, so that runs do not affect each other.
const data = fs.mkdtempSync(path.join(os.tmpdir(), "speedscope-"));
const context = await chromium.launchPersistentContext(data, {
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    headless: true,
    // High enough for all rows: rows outside the viewport are not in the DOM.
    viewport: { width: 1400, height: 2400 },
    args: [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ],
});
try {
    for (const pair of wanted) {
        const [span, name] = pair.split("=");
        await check(context, span, name);
    }
} finally {
    await context.close();
    fs.rmSync(data, { recursive: true, force: true });
}
