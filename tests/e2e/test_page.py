"""Test the web page in a real Chromium with a fake API, and its HTTP responses without a browser."""

import re
from collections.abc import Iterator

import chromium
import pytest
import requests
from playwright.sync_api import Browser, Page, Request, Route, expect
from pretend_api import KEY, PretendApi, running, wait_until

from raymill.serving.page import FOLDER, HTML

MARKDOWN = """Use a **list comprehension**, see [the docs](https://docs.python.org/3/):

```python
def squares(numbers):
    return [number ** 2 for number in numbers if number < 1_000_000_000 and number > -1_000_000_000]
```

1. First `code`
   - nested

| method | time in milliseconds | memory in mebibytes | comment |
|:--|--:|:-:|---|
| loop | 12 | 1 | aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa |
"""
CODE = MARKDOWN.split("```")[1].removeprefix("python\n").removesuffix("\n")
FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
DISTANCE = "main => main.scrollHeight - main.clientHeight - main.scrollTop"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PretendApi]:
    with running(tmp_path_factory.mktemp("api")) as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium.running() as started:
        yield started


@pytest.fixture
def page(browser: Browser, api: PretendApi) -> Iterator[Page]:
    """Open the page. Check that it raises no error, sends requests only to its own origin, and puts no key in a URL."""
    api.chunks, api.delay_s, api.finish_reason = ["All ", "is ", "well."], 0.0, "stop"
    api.resume.set()
    api.requests.clear()
    requests_sent: list[Request] = []
    errors: list[str] = []
    with browser.new_context() as context:
        opened = context.new_page()
        opened.set_default_timeout(10_000)
        opened.on("request", lambda request: requests_sent.append(request))
        opened.on("pageerror", lambda error: errors.append(str(error)))
        opened.goto(api.root)
        yield opened
        assert not errors
        sent = [each.url for each in requests_sent if each.failure != "csp"]
        assert not [url for url in sent if not url.startswith((f"{api.root}/", "data:"))]
        assert not [url for url in sent if KEY in url]


def sign_in(page: Page) -> None:
    page.get_by_label("API key").fill(KEY)
    page.get_by_label("API key").press("Enter")
    expect(page.get_by_label("Model")).to_have_value("small")


def ask(page: Page, text: str) -> None:
    page.get_by_label("Your question").fill(text)
    page.get_by_label("Your question").press("Enter")


def ask_and_wait(page: Page, text: str) -> None:
    finished = page.locator(".assistant:not([aria-busy])")
    count = finished.count()
    ask(page, text)
    expect(finished).to_have_count(count + 1)


def distance_from_the_end(page: Page) -> int:
    page.evaluate(FRAMES)  # the page scrolls when it is drawn
    return page.locator("main").evaluate(DISTANCE)


def test_reasoning_is_shown_apart_and_not_sent_back(
    page: Page, api: PretendApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "reasoning", "Let me look.")
    sign_in(page)
    ask(page, "How is it?")
    answer = page.get_by_role("log").locator("article").last
    expect(answer.locator("small")).to_have_text("Let me look.")
    expect(answer.locator("p")).to_have_text("All is well.")
    ask_and_wait(page, "And now?")
    expect(answer.locator("p")).to_have_text("All is well.")
    assert [message["content"] for message in api.requests[-1]["messages"]] == [
        "How is it?",
        "All is well.",
        "And now?",
    ]


def test_an_answer_appears_while_it_is_streamed(page: Page, api: PretendApi) -> None:
    sign_in(page)
    page.get_by_text("System prompt").click()
    page.get_by_label("System prompt").fill("be brief")
    api.resume.clear()
    ask(page, "How is it?")
    log = page.get_by_role("log")
    expect(log).to_contain_text("How is it?")
    expect(log.locator("article").last).to_have_text("smallAll ")
    assert page.get_by_role("button", name="Stop").is_visible()
    api.resume.set()
    expect(log.locator("article").last).to_have_text("smallAll is well.")
    page.get_by_label("Model").select_option("large")
    ask(page, "And now?")
    expect(log.locator("article").last).to_have_text("largeAll is well.")
    conversation = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "All is well."},
        {"role": "user", "content": "And now?"},
    ]
    sent = [(request["model"], request["messages"]) for request in api.requests]
    assert sent == [("small", conversation[:2]), ("large", conversation)]
    page.get_by_role("button", name="Clear").click()
    expect(log).to_be_empty()
    ask(page, "And again?")
    expect(log.locator("article").last).to_have_text("largeAll is well.")
    expect(log.locator("article")).to_have_count(2)
    assert api.requests[-1]["messages"] == [conversation[0], {"role": "user", "content": "And again?"}]


def test_a_wrong_key_shows_the_servers_message(page: Page) -> None:
    page.get_by_label("API key").fill("wrong")
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("a valid API key is required")
    expect(page.get_by_label("Your question")).to_have_value("hello")
    expect(page.get_by_role("log")).to_be_empty()
    sign_in(page)
    expect(page.get_by_role("alert")).to_be_empty()


def test_a_late_answer_to_an_earlier_key_changes_nothing(page: Page) -> None:
    late: list[Route] = []

    def hold_the_wrong_key(route: Route) -> None:
        if "wrong" in route.request.headers["authorization"]:
            late.append(route)
        else:
            route.continue_()

    page.route("**/v1/models", hold_the_wrong_key)
    page.get_by_label("API key").fill("wrong")
    page.get_by_label("API key").press("Enter")
    sign_in(page)
    with page.expect_response(lambda response: response.status == 401):
        late[0].continue_()
    page.wait_for_timeout(500)  # longer than the page needs to show the answer
    expect(page.get_by_label("Model")).to_have_value("small")
    expect(page.get_by_role("alert")).to_be_empty()


def test_a_rejected_question_can_be_edited(page: Page, api: PretendApi) -> None:
    sign_in(page)
    ask(page, "too long")
    expect(page.get_by_role("alert")).to_have_text("at most 256 tokens")
    expect(page.get_by_label("Your question")).to_have_value("too long")
    ask(page, "shorter")
    expect(page.get_by_role("log")).to_contain_text("All is well.")
    expect(page.get_by_role("alert")).to_be_empty()
    assert api.requests[-1]["messages"] == [{"role": "user", "content": "shorter"}]


def test_html_in_an_answer_is_shown_as_text(page: Page, api: PretendApi) -> None:
    api.chunks = ["<script>window.", "seen=1</script><img src=/x onerror='window.seen=1'>", "<b>bold</b>"]
    sign_in(page)
    ask(page, "<i>hello</i>")
    expect(page.get_by_role("log")).to_contain_text("".join(api.chunks))
    expect(page.get_by_role("log")).to_contain_text("<i>hello</i>")
    assert page.locator("#conversation").locator("script, img, b, i").count() == 0
    assert page.evaluate("window.seen") is None


def test_markdown_in_an_answer_is_formatted(page: Page, api: PretendApi) -> None:
    api.chunks = [MARKDOWN[start : start + 7] for start in range(0, len(MARKDOWN), 7)]
    sign_in(page)
    ask_and_wait(page, "How?")
    answer = page.locator(".content")
    expect(answer.locator("strong")).to_have_text("list comprehension")
    expect(answer.locator("ol > li > ul > li")).to_have_text("nested")
    expect(answer.locator("td")).to_have_text(["loop", "12", "1", "a" * 40])
    assert answer.locator("td").nth(1).evaluate("cell => getComputedStyle(cell).textAlign").endswith("right")
    link = answer.get_by_role("link", name="the docs")
    expect(link).to_have_attribute("href", "https://docs.python.org/3/")
    expect(link).to_have_attribute("title", "https://docs.python.org/3/")
    expect(link).to_have_attribute("rel", "noopener noreferrer")
    ask_and_wait(page, "And now?")
    assert api.requests[-1]["messages"][1]["content"] == MARKDOWN


@pytest.mark.parametrize("clipboard", ["clipboard", "no clipboard"])
def test_code_can_be_copied(page: Page, api: PretendApi, clipboard: str) -> None:
    """Browsers have no `navigator.clipboard` for pages without TLS."""
    if clipboard == "no clipboard":
        page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    api.chunks = [MARKDOWN]
    sign_in(page)
    ask_and_wait(page, "How?")
    expect(page.locator(".code")).to_contain_text("python")
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    page.get_by_label("Your question").focus()
    page.keyboard.press("Control+V")
    expect(page.get_by_label("Your question")).to_have_value(CODE)


def test_finished_blocks_stay_while_the_answer_grows(page: Page, api: PretendApi) -> None:
    """A block that is replaced loses what the user has selected in it."""
    api.chunks = ["First.\n\n", "Second."]
    api.resume.clear()
    sign_in(page)
    ask(page, "How?")
    block = page.locator(".content > div").first
    expect(block).to_have_text("First.")
    block.evaluate("block => { window.block = block; }")
    api.resume.set()
    expect(page.locator(".content")).to_contain_text("Second.")
    assert block.evaluate("block => block === window.block")


HOSTILE_MARKDOWN = [
    "[a](javascript:window.seen=1)",
    "[a](JaVaScRiPt:window.seen=1)",
    "[a](&#106;avascript:window.seen=1)",
    "[a](java\tscript:window.seen=1)",
    "[a](<java&NewLine;script:window.seen=1>)",
    "[a](\x01javascript:window.seen=1)",
    "<javascript:window.seen=1>",
    "[a](data:text/html,<script>window.seen=1</script>)",
    "[a](vbscript:window.seen)",
    "[a](file:///etc/passwd) [b](/v1/models) [c](//example.com/x) [d](blob:x) [e](https:example.com)",
    "[a][1]\n\n[1]: javascript:window.seen=1",
    "![a](https://example.com/x.png) ![b](/x.png) ![c](data:image/svg+xml,<svg/onload=window.seen=1>)",
    '![a"onerror=window.seen=1](https://example.com/"onerror=window.seen=1)',
    "[![a](https://example.com/x.png)](https://example.com/y)",
    "![a][1]\n\n[1]: https://example.com/x.png",
    "[a](https://example.com 'x\" onmouseover=\"window.seen=1')",
    '```a"onclick=window.seen=1\n<img src=https://example.com/x onerror=window.seen=1>\n```',
    "|<img src=https://example.com/x>|\n|-|\n|<style>@import 'https://example.com/x'</style>|",
    "<style>@import 'https://example.com/x'</style><link rel=prefetch href=https://example.com/x>",
    "<meta http-equiv=refresh content='0;https://example.com'><base href=https://example.com>",
    "<iframe srcdoc='<script>parent.seen=1</script>'></iframe><form action=https://example.com><input autofocus>",
    "<svg><animate onbegin=window.seen=1 attributeName=x></svg><math><mtext><style><img src=x onerror=seen=1>",
    "<video poster=https://example.com/x><audio src=https://example.com/x autoplay><object data=https://example.com/x>",
    "<a href='https://example.com' ping='https://example.com/x' style='background:url(https://example.com/x)'>a</a>",
    "<a href='javascript:window.seen=1'>a</a><a href=' java\nscript:window.seen=1'>b</a><a href='//example.com'>c</a>",
    "<p id=key class=note style='position:fixed'>x</p><input id=question>",
]
OUTSIDE = (
    "script, style, img, svg, iframe, form, input, link, meta, base, video, audio, object, [style], [id], [onclick]"
)


@pytest.mark.parametrize("part", ["rendered", "only sanitized"])
def test_an_answer_runs_no_code_and_calls_no_server(page: Page, api: PretendApi, part: str) -> None:
    """The sanitizer alone must suffice, too: no rule of the Markdown is needed for safety."""
    if part == "only sanitized":
        page.evaluate("() => { window.format = (text) => text.split('\\n\\n'); }")
    api.chunks = ["\n\n".join(HOSTILE_MARKDOWN)]
    sign_in(page)
    ask_and_wait(page, "hello")
    page.wait_for_timeout(500)  # an image would be loaded by now, and the fixture `page` would see its request
    answer = page.locator(".content")
    assert answer.locator(OUTSIDE).count() == 0
    links = answer.locator("a").evaluate_all("links => links.map((link) => link.getAttribute('href'))")
    assert all(link is None or link.startswith("https://") for link in links), links
    assert page.evaluate("window.seen") is None
    assert page.url == f"{api.root}/"


@pytest.mark.parametrize("unit", ["> ", "1. ", "_*a", "!", "_*a" * 800 + "\n\n"])
def test_an_answer_does_not_stop_the_page(page: Page, api: PretendApi, unit: str) -> None:
    """Without the page's limits, the third text stops it for a minute."""
    text = (unit * 60_000)[:60_000]
    api.chunks = [text]
    sign_in(page)
    ask_and_wait(page, "hello")
    expect(page.locator(".content")).not_to_be_empty()
    expect(page.get_by_role("alert")).to_be_empty()
    took = page.evaluate(
        "text => { const start = performance.now(); format(text); return performance.now() - start; }", text
    )
    assert took < 5_000


def test_an_answer_that_marked_rejects_is_shown_as_text(page: Page, api: PretendApi) -> None:
    page.evaluate("() => { markdown.parser = () => { throw new Error('Infinite loop on byte: 60'); }; }")
    api.chunks = ["<b>All</b>\n", "is **well**."]
    sign_in(page)
    ask_and_wait(page, "hello")
    expect(page.locator(".content")).to_have_text("<b>All</b>\nis **well**.")


def test_citations_open_their_sources_as_text(page: Page, api: PretendApi, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "<script>window.seen=1</script><img src=/x onerror='window.seen=1'>"
    names = ["https://example.com/a?b=1", "notes/<b>.md", "javascript:window.seen=1"]
    sources = [{"number": number, "document": name, "text": f"{text}{number}"} for number, name in enumerate(names, 1)]
    monkeypatch.setattr(api, "sources", sources)
    api.chunks = ["It is so [", "2], or [1, 3", "], not 1 or [7] or [x]."]
    sign_in(page)
    ask(page, "Why?")
    answer = page.get_by_role("log").locator("article").last
    expect(answer.locator("p").first).to_have_text("It is so [2], or [1, 3], not 1 or [7] or [x].")
    expect(answer.locator("p").first.get_by_role("link")).to_have_text(["2", "1", "3"])
    expect(answer.locator("summary")).to_have_text([f"[{number}] {name}" for number, name in enumerate(names, 1)])
    expect(page.get_by_text(f"{text}2")).to_be_hidden()
    answer.get_by_role("link", name="2").click()
    expect(page.get_by_text(f"{text}2")).to_be_visible()
    expect(page.get_by_text(f"{text}1")).to_be_hidden()
    answer.locator("summary").nth(0).click()
    answer.locator("summary").nth(2).click()
    document = answer.get_by_role("link", name="Open the document")  # only of the document that has an address
    expect(document).to_have_attribute("href", names[0])
    assert page.locator("#conversation").locator("script, img, b").count() == 0
    assert page.evaluate("window.seen") is None
    ask_and_wait(page, "And now?")
    assert api.requests[-1]["messages"][1]["content"] == "".join(api.chunks)


def test_the_stop_button_ends_the_answer_in_browser_and_server(page: Page, api: PretendApi) -> None:
    api.chunks, api.delay_s = ["and on "] * 2000, 0.02
    sign_in(page)
    ask(page, "Tell me all.")
    answer = page.get_by_role("log").locator("article").last
    expect(answer).to_contain_text("and on and on")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    shown = answer.locator(".content").text_content()
    sent = -1

    def has_stopped() -> bool:
        nonlocal sent
        before, sent = sent, api.sent
        page.wait_for_timeout(200)
        return before == sent

    wait_until(has_stopped)
    assert answer.locator(".content").text_content() == shown
    expect(page.get_by_role("alert")).to_be_empty()
    api.chunks = ["Enough."]
    ask(page, "And then?")
    expect(page.get_by_role("log")).to_contain_text("Enough.")
    kept = api.requests[-1]["messages"][1]
    assert (kept["role"], kept["content"].strip()) == ("assistant", (shown or "").strip())


def test_escape_stops_the_answer(page: Page, api: PretendApi) -> None:
    api.chunks, api.delay_s = ["and on "] * 2000, 0.02
    sign_in(page)
    ask(page, "Tell me all.")
    expect(page.locator(".content")).to_contain_text("and on and on")
    # input methods use Escape, too
    page.get_by_label("Your question").dispatch_event("keydown", {"key": "Escape", "isComposing": True})
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.get_by_label("API key").focus()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.get_by_text("You stopped this answer.")).to_be_visible()
    expect(page.get_by_role("alert")).to_be_empty()


@pytest.mark.parametrize("size", [(1280, 800), (320, 480)], ids=str)
def test_the_view_follows_the_answer(page: Page, api: PretendApi, size: tuple[int, int]) -> None:
    page.set_viewport_size({"width": size[0], "height": size[1]})
    api.chunks = [f"Line {number}\n\n" for number in range(60)]
    sign_in(page)
    for number in range(3):
        ask_and_wait(page, f"question {number}")
        assert distance_from_the_end(page) < 2
    page.locator("details").first.click()  # the header grows, and the conversation gets less space
    assert distance_from_the_end(page) < 2


def test_the_view_stays_where_the_user_scrolled(page: Page, api: PretendApi) -> None:
    api.chunks = ["Line\n\n" * 60, "More\n\n" * 60]
    api.resume.clear()
    sign_in(page)
    ask(page, "hello")
    expect(page.locator(".content > div")).to_have_count(60)
    assert distance_from_the_end(page) < 2
    page.mouse.move(200, 300)
    page.mouse.wheel(0, -200)
    wait_until(lambda: distance_from_the_end(page) >= 200)
    before = page.locator("main").evaluate("main => main.scrollTop")
    api.resume.set()
    expect(page.locator(".content > div")).to_have_count(120)
    page.evaluate(FRAMES)
    assert page.locator("main").evaluate("main => main.scrollTop") == before
    ask_and_wait(page, "And now?")
    assert distance_from_the_end(page) < 2


@pytest.mark.parametrize(
    ("reason", "note"),
    [
        ("length", "This answer is cut off: it reached the maximum length."),
        ("content_filter", "This answer is cut off: it ended with `content_filter`."),
    ],
)
def test_an_answer_that_is_cut_off_says_so(page: Page, api: PretendApi, reason: str, note: str) -> None:
    api.finish_reason = reason
    sign_in(page)
    ask_and_wait(page, "hello")
    expect(page.locator(".note")).to_have_text(note)
    api.finish_reason = "stop"
    ask_and_wait(page, "And now?")
    expect(page.locator(".note")).to_have_count(1)
    assert api.requests[-1]["messages"][1]["content"] == "All is well."


@pytest.mark.parametrize("chunks", [[], [""], [" \n", "\n"]])
def test_an_empty_answer_says_so(page: Page, api: PretendApi, chunks: list[str]) -> None:
    api.chunks, api.finish_reason = chunks, "length"
    sign_in(page)
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_have_text(
        "The model sent an empty answer: it reached the maximum length. Change your question, or send it again."
    )
    expect(page.get_by_label("Your question")).to_have_value("hello")
    expect(page.get_by_role("log")).to_be_empty()


def test_reasoning_without_an_answer_stays(page: Page, api: PretendApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "reasoning", "Let me look.")
    api.chunks, api.finish_reason = [], "length"
    sign_in(page)
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("The model sent an empty answer: it reached the maximum length.")
    expect(page.get_by_role("log")).to_contain_text("Let me look.")
    expect(page.get_by_text("This question has no answer, and is not sent with the next one.")).to_be_visible()
    api.chunks = ["Here."]
    ask_and_wait(page, "again")
    expect(page.get_by_role("log")).to_contain_text("Here.")
    assert api.requests[-1]["messages"] == [{"role": "user", "content": "again"}]


@pytest.mark.parametrize("size", [(1280, 800), (320, 480)], ids=str)
def test_nothing_takes_the_whole_screen(page: Page, api: PretendApi, size: tuple[int, int]) -> None:
    """The question comes back after an error, so both can be long."""
    page.set_viewport_size({"width": size[0], "height": size[1]})
    api.chunks = [MARKDOWN]
    sign_in(page)
    ask_and_wait(page, "hello")
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert page.locator("main").evaluate("main => main.scrollWidth <= main.clientWidth")
    assert page.locator("main").evaluate("main => main.clientHeight") >= size[1] / 2
    long = "This is wrong. " * 300
    page.evaluate(
        f"window.fetch = async () => new Response(JSON.stringify({{error: {{message: '{long}'}}}}), {{status: 400}})"
    )
    ask(page, "too long\n" * 100)
    expect(page.get_by_role("alert")).to_contain_text("This is wrong.")
    assert page.locator("main").evaluate("main => main.clientHeight") >= size[1] / 6
    for label in ("Your question", "API key"):
        expect(page.get_by_label(label)).to_be_in_viewport(ratio=1)
    expect(page.get_by_role("button", name="Send")).to_be_in_viewport(ratio=1)
    assert page.get_by_role("alert").evaluate("alert => alert.scrollHeight > alert.clientHeight")  # it can be scrolled


@pytest.mark.parametrize("body", ["{}", '{"error": {}}', '{"error": {"message": ""}}', "<html>Bad gateway</html>"])
def test_an_error_without_a_message_names_the_status(page: Page, body: str) -> None:
    sign_in(page)
    page.evaluate("body => { window.fetch = async () => new Response(body, {status: 502}); }", body)
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_have_text("the server answered with status 502")


def test_clear_during_an_answer_discards_it(page: Page, api: PretendApi) -> None:
    sign_in(page)
    api.resume.clear()
    ask(page, "hello")
    expect(page.get_by_role("log")).to_contain_text("All")
    page.get_by_role("button", name="Clear").click()
    api.resume.set()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    ask(page, "again")
    expect(page.get_by_role("log")).to_contain_text("All is well.")
    assert api.requests[-1]["messages"] == [{"role": "user", "content": "again"}]


def test_a_stream_that_breaks_off_shows_an_error(page: Page, api: PretendApi) -> None:
    sign_in(page)
    page.evaluate('window.fetch = async () => new Response(\'data: {"choices": [{"delta": {"content": "half"}}]}\\n\')')
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("the answer was cut off")
    expect(page.get_by_role("log")).to_contain_text("half")
    expect(page.get_by_text("This answer is incomplete.")).to_be_visible()


def test_the_key_is_only_in_the_memory_of_the_tab(page: Page) -> None:
    sign_in(page)
    ask(page, "hello")
    expect(page.get_by_role("log")).to_contain_text("All is well.")
    assert page.evaluate("localStorage.length + sessionStorage.length") == 0
    assert not page.context.cookies()
    assert page.get_by_label("API key").get_attribute("type") == "password"
    page.reload()
    expect(page.get_by_label("API key")).to_have_value("")
    expect(page.get_by_role("log")).to_be_empty()


def test_other_origins_and_injected_scripts_are_blocked(page: Page, api: PretendApi) -> None:
    other_origin = api.root.replace("127.0.0.1", "localhost")
    fetch = "address => fetch(address, {mode: 'no-cors'}).then(() => 'allowed', () => 'blocked')"
    assert page.evaluate(fetch, other_origin) == "blocked"
    outcome = page.evaluate(
        """() => {
            const script = document.createElement("script");
            try { script.textContent = "window.seen = 1"; } catch { return "blocked"; }
            document.body.append(script);
            return window.seen ? "ran" : "blocked";
        }"""
    )
    assert outcome == "blocked"
    for sink in ("document.createElement('p').innerHTML = '<b>x</b>'", "trustedTypes.createPolicy('other', {})"):
        assert page.evaluate(f"() => {{ try {{ {sink}; }} catch {{ return 'blocked'; }} }}") == "blocked"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(page: Page, api: PretendApi, scheme: str) -> None:
    """WCAG 2, level AA, requires a contrast ratio of at least 4.5 for text."""
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    api.chunks, api.finish_reason = [MARKDOWN], "length"
    sign_in(page)
    ask_and_wait(page, "hello")
    ask(page, "too long")
    expect(page.get_by_role("alert")).to_have_text("at most 256 tokens")
    for text in (
        "#conversation .user p",
        ".content p",
        ".content a",
        ".content p code, .content li code",
        ".content pre",
        ".content th",
        ".code span",
        ".code button",
        ".note",
        "#conversation h2",
        "label span",
        "#error",
        "#send",
        "#question",
    ):
        assert page.locator(text).first.evaluate(CONTRAST) >= 4.5, text
    background = page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
    assert (int(background.removeprefix("rgb(").split(",")[0]) < 128) == (scheme == "dark")


CONTRAST = """element => {
    const parts = (color) => color.match(/[\\d.]+/g).map(Number);
    const light = (color) => parts(color).slice(0, 3).map((part) => part / 255)
        .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
    let behind = element;
    while (parts(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
    const [one, other] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(light);
    return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
}"""


# ---------------------------------------------------------------- without a browser


def test_the_page_needs_no_key_and_is_only_at_the_root(api: PretendApi) -> None:
    answer = requests.get(api.root, timeout=10)
    assert (answer.status_code, answer.text) == (200, HTML)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-dns-prefetch-control"] == "off"
    head = requests.head(api.root, timeout=10)
    assert (head.status_code, head.content) == (200, b"")
    for method, path in [("post", "/"), ("put", "/"), ("options", "/"), ("get", "//"), ("get", "/index.html")]:
        assert requests.request(method, api.root + path, timeout=10).status_code == 401, (method, path)


def test_the_page_refers_to_no_other_site() -> None:
    source = (FOLDER / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"//\w", source.replace("http://www.w3.org/2000/svg", ""))
