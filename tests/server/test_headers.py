"""What stays on one hop, what goes on, what is added."""

from ocgpu.server.relay.headers import forwarded, request_headers, response_headers

SCOPE = {"client": ("192.0.2.7", "4711"), "scheme": "http"}


def test_hop_by_hop_headers_and_those_that_connection_names_stay_here() -> None:
    headers = [
        (b"host", b"a"),
        (b"connection", b"keep-alive, X-Mine"),
        (b"connection", b"close"),
        (b"x-mine", b"1"),
        (b"keep-alive", b"timeout=5"),
        (b"te", b"trailers"),
        (b"transfer-encoding", b"chunked"),
        (b"upgrade", b"h2c"),
        (b"expect", b"100-continue"),
        (b"proxy-authorization", b"secret"),
        (b"authorization", b"Bearer x"),
        (b"x-twice", b"1"),
        (b"x-twice", b"2"),
    ]

    assert request_headers(headers) == [
        (b"host", b"a"),
        (b"authorization", b"Bearer x"),
        (b"x-twice", b"1"),
        (b"x-twice", b"2"),
    ]


def test_connection_cannot_strip_what_routes_and_frames() -> None:
    headers = [
        (b"host", b"a"),
        (b"content-length", b"3"),
        (b"connection", b"Host, Content-Length, Authorization"),
        (b"authorization", b"Bearer x"),
    ]

    assert request_headers(headers) == [headers[0], headers[1], headers[3]]


def test_response_keeps_repetitions_server_and_date() -> None:
    headers = [
        (b"Server", b"Python aiohttp"),
        (b"Date", b"now"),
        (b"Set-Cookie", b"a=1"),
        (b"Set-Cookie", b"b=2"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Connection", b"close"),
    ]

    assert response_headers(headers) == [
        (b"server", b"Python aiohttp"),
        (b"date", b"now"),
        (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
    ]


def test_streams_are_marked_not_to_be_buffered() -> None:
    unbuffered = (b"x-accel-buffering", b"no")

    for kind in (b"text/event-stream", b"application/x-ndjson", b"text/event-stream;charset=utf-8"):
        assert unbuffered in response_headers([(b"Content-Type", kind)])
    assert unbuffered not in response_headers([(b"Content-Type", b"application/json")])
    assert response_headers(
        [(b"Content-Type", b"text/event-stream"), (b"X-Accel-Buffering", b"yes")]
    ) == [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"yes")]


def test_forwarded_headers_are_added_for_a_direct_client() -> None:
    assert forwarded([(b"host", b"gpu:11435")], SCOPE) == [
        (b"host", b"gpu:11435"),
        (b"x-forwarded-for", b"192.0.2.7"),
        (b"x-forwarded-proto", b"http"),
        (b"x-forwarded-host", b"gpu:11435"),
    ]


def test_forwarded_headers_of_a_proxy_in_front_are_kept_and_the_chain_grows() -> None:
    headers = [
        (b"host", b"gpu"),
        (b"x-forwarded-for", b"198.51.100.1"),
        (b"x-forwarded-proto", b"https"),
        (b"x-forwarded-host", b"ai.example.com"),
    ]

    assert sorted(forwarded(headers, SCOPE)) == sorted(
        [
            (b"host", b"gpu"),
            (b"x-forwarded-for", b"198.51.100.1, 192.0.2.7"),
            (b"x-forwarded-proto", b"https"),
            (b"x-forwarded-host", b"ai.example.com"),
        ]
    )


def test_a_mapped_ipv4_client_is_named_by_its_ipv4_address() -> None:
    scope = {"client": ("::ffff:192.0.2.7", "1"), "scheme": "wss"}

    headers = forwarded([], scope)

    assert headers == [(b"x-forwarded-for", b"192.0.2.7"), (b"x-forwarded-proto", b"https")]


def test_what_a_client_that_is_no_proxy_of_ours_claims_is_dropped() -> None:
    headers = [
        (b"x-forwarded-for", b"1.1.1.1"),
        (b"x-forwarded-proto", b"https"),
        (b"x-forwarded-host", b"bank.example"),
        (b"x-forwarded-user", b"root"),
        (b"forwarded", b"for=1.1.1.1"),
        (b"x-real-ip", b"1.1.1.1"),
        (b"host", b"gpu"),
    ]

    assert forwarded(headers, SCOPE, trusted=False) == [
        (b"host", b"gpu"),
        (b"x-forwarded-for", b"192.0.2.7"),
        (b"x-forwarded-proto", b"http"),
        (b"x-forwarded-host", b"gpu"),
    ]


def test_a_length_that_is_said_twice_goes_on_once() -> None:
    headers = [(b"content-length", b"2"), (b"x", b"1"), (b"content-length", b"2")]

    assert request_headers(headers) == headers[:2]
