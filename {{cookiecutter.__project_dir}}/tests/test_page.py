"""The page on which a person tries a served model, in a real Chromium; and what of the server is open to all."""

from collections.abc import Iterator

import chromium
import pytest
import requests
from playwright.sync_api import Browser, Page, Request, expect
from pretend_api import KEY, PretendApi, running, wait_until

from pipeline.serving.page import TEXT


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
    """The page, opened by somebody new; all that it asks for must be of its own origin, and no address has the key."""
    api.pieces, api.pause_s = ["All ", "is ", "well."], 0.0
    api.go_on.set()
    api.asked.clear()
    asked_for: list[Request] = []
    errors: list[str] = []
    with browser.new_context() as context:
        opened = context.new_page()
        opened.set_default_timeout(10_000)
        opened.on("request", lambda asked: asked_for.append(asked))
        opened.on("pageerror", lambda error: errors.append(str(error)))
        opened.goto(api.root)
        yield opened
        assert not errors
        sent = [asked.url for asked in asked_for if asked.failure != "csp"]
        assert not [url for url in sent if not url.startswith((f"{api.root}/", "data:"))]
        assert not [url for url in sent if KEY in url]


def sign_in(page: Page) -> None:
    page.get_by_label("API key").fill(KEY)
    page.get_by_label("API key").press("Enter")
    expect(page.get_by_label("Model")).to_have_value("small")


def ask(page: Page, text: str) -> None:
    page.get_by_label("Your question").fill(text)
    page.get_by_label("Your question").press("Enter")


def test_a_person_asks_and_the_answer_appears_as_it_comes(page: Page, api: PretendApi) -> None:
    sign_in(page)
    page.get_by_text("System prompt").click()
    page.get_by_label("System prompt").fill("be brief")
    api.go_on.clear()
    ask(page, "How is it?")
    log = page.get_by_role("log")
    expect(log).to_contain_text("How is it?")
    expect(log.locator("article").last).to_have_text("smallAll ")
    assert page.get_by_role("button", name="Stop").is_visible()
    api.go_on.set()
    expect(log.locator("article").last).to_have_text("smallAll is well.")
    page.get_by_label("Model").select_option("large")
    ask(page, "And now?")
    expect(log.locator("article").last).to_have_text("largeAll is well.")
    said = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "All is well."},
        {"role": "user", "content": "And now?"},
    ]
    assert [(asked["model"], asked["messages"]) for asked in api.asked] == [("small", said[:2]), ("large", said)]
    page.get_by_role("button", name="Clear").click()
    expect(log).to_be_empty()
    ask(page, "Anew?")
    expect(log.locator("article")).to_have_count(2)
    assert api.asked[-1]["messages"] == [said[0], {"role": "user", "content": "Anew?"}]


def test_a_wrong_key_is_told_in_the_server_s_words(page: Page) -> None:
    page.get_by_label("API key").fill("wrong")
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("a valid API key is required")
    expect(page.get_by_label("Your question")).to_have_value("hello")
    expect(page.get_by_role("log")).to_be_empty()
    sign_in(page)
    expect(page.get_by_role("alert")).to_be_empty()


def test_a_refused_question_can_be_changed(page: Page, api: PretendApi) -> None:
    sign_in(page)
    ask(page, "too long")
    expect(page.get_by_role("alert")).to_have_text("at most 256 tokens")
    expect(page.get_by_label("Your question")).to_have_value("too long")
    ask(page, "shorter")
    expect(page.get_by_role("log")).to_contain_text("All is well.")
    expect(page.get_by_role("alert")).to_be_empty()
    assert api.asked[-1]["messages"] == [{"role": "user", "content": "shorter"}]


def test_what_the_model_says_is_text(page: Page, api: PretendApi) -> None:
    api.pieces = ["<script>window.", "seen=1</script><img src=/x onerror='window.seen=1'>", "<b>bold</b>"]
    sign_in(page)
    ask(page, "<i>hello</i>")
    expect(page.get_by_role("log")).to_contain_text("".join(api.pieces))
    expect(page.get_by_role("log")).to_contain_text("<i>hello</i>")
    assert page.locator("#said").locator("script, img, b, i").count() == 0
    assert page.evaluate("window.seen") is None


def test_stop_ends_the_answer_on_both_sides(page: Page, api: PretendApi) -> None:
    api.pieces, api.pause_s = ["and on "] * 2000, 0.02
    sign_in(page)
    ask(page, "Tell me all.")
    answer = page.get_by_role("log").locator("article").last
    expect(answer).to_contain_text("and on and on")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    said = answer.locator("p").text_content()
    sent = -1

    def stands_still() -> bool:
        nonlocal sent
        before, sent = sent, api.sent
        page.wait_for_timeout(200)
        return before == sent

    wait_until(stands_still)
    assert answer.locator("p").text_content() == said
    expect(page.get_by_role("alert")).to_be_empty()
    api.pieces = ["Enough."]
    ask(page, "And then?")
    expect(page.get_by_role("log")).to_contain_text("Enough.")
    assert api.asked[-1]["messages"][1] == {"role": "assistant", "content": said}


def test_clearing_half_way_forgets_the_answer(page: Page, api: PretendApi) -> None:
    sign_in(page)
    api.go_on.clear()
    ask(page, "hello")
    expect(page.get_by_role("log")).to_contain_text("All")
    page.get_by_role("button", name="Clear").click()
    api.go_on.set()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    ask(page, "again")
    expect(page.get_by_role("log")).to_contain_text("All is well.")
    assert api.asked[-1]["messages"] == [{"role": "user", "content": "again"}]


def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(page: Page, api: PretendApi) -> None:
    sign_in(page)
    page.evaluate('window.fetch = async () => new Response(\'data: {"choices": [{"delta": {"content": "half"}}]}\\n\')')
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("the answer was cut off")
    expect(page.get_by_role("log")).to_contain_text("half")


def test_the_key_is_nowhere_but_in_the_tab(page: Page) -> None:
    sign_in(page)
    ask(page, "hello")
    expect(page.get_by_role("log")).to_contain_text("All is well.")
    assert page.evaluate("localStorage.length + sessionStorage.length") == 0
    assert not page.context.cookies()
    assert page.get_by_label("API key").get_attribute("type") == "password"
    page.reload()
    expect(page.get_by_label("API key")).to_have_value("")
    expect(page.get_by_role("log")).to_be_empty()


def test_nothing_of_elsewhere_gets_into_the_page(page: Page, api: PretendApi) -> None:
    elsewhere = api.root.replace("127.0.0.1", "localhost")
    fetch = "address => fetch(address, {mode: 'no-cors'}).then(() => 'let through', () => 'refused')"
    assert page.evaluate(fetch, elsewhere) == "refused"
    refused = page.evaluate(
        """() => {
            const script = document.createElement("script");
            try { script.textContent = "window.seen = 1"; } catch { return "refused"; }
            document.body.append(script);
            return window.seen ? "ran" : "refused";
        }"""
    )
    assert refused == "refused"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_by_day_and_by_night(page: Page, scheme: str) -> None:
    """Contrast as WCAG 2 counts it; 4.5 is what its level AA asks of text."""
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    sign_in(page)
    ask(page, "hello")
    expect(page.get_by_role("log")).to_contain_text("All is well.")
    ask(page, "too long")
    expect(page.get_by_role("alert")).to_have_text("at most 256 tokens")
    for text in ("#said .user p", "#said .assistant p", "#said h2", "label span", "#wrong", "#send", "#question"):
        assert page.locator(text).first.evaluate(CONTRAST) >= 4.5, text
    ground = page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
    assert (int(ground.removeprefix("rgb(").split(",")[0]) < 128) == (scheme == "dark")


CONTRAST = """element => {
    const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (colour) => parts(colour).slice(0, 3).map((part) => part / 255)
        .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
    let behind = element;
    while (parts(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
    const [one, other] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(light);
    return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
}"""


# ---------------------------------------------------------------- without a browser


def test_the_page_is_there_without_a_key_and_at_one_place_alone(api: PretendApi) -> None:
    answer = requests.get(api.root, timeout=10)
    assert (answer.status_code, answer.text) == (200, TEXT)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    head = requests.head(api.root, timeout=10)
    assert (head.status_code, head.content) == (200, b"")
    for method, path in [("post", "/"), ("put", "/"), ("options", "/"), ("get", "//"), ("get", "/index.html")]:
        assert requests.request(method, api.root + path, timeout=10).status_code == 401, (method, path)


def test_the_page_names_no_other_place() -> None:
    assert "//" not in TEXT.replace("// ", "").replace("http://www.w3.org/2000/svg", "")
