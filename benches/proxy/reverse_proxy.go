// Go's httputil.ReverseProxy as its documentation has it: with upstream keep-alive, and without.
package main

import (
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
)

func listen(target *url.URL, fresh bool) net.Listener {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(request *httputil.ProxyRequest) {
			request.SetURL(target)
			request.SetXForwarded()
		},
		Transport:     &http.Transport{MaxIdleConnsPerHost: 512, DisableKeepAlives: fresh, DisableCompression: true},
		FlushInterval: -1,
		ErrorLog:      log.New(io.Discard, "", 0),
	}
	go func() { log.Fatal(http.Serve(listener, proxy)) }()
	return listener
}

func main() {
	target, err := url.Parse(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	for _, fresh := range []bool{false, true} {
		fmt.Println(listen(target, fresh).Addr().(*net.TCPAddr).Port)
	}
	// Ends with the one who started it.
	_, _ = os.Stdin.Read(make([]byte, 1))
}
