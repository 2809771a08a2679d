/* A client that loads an HTTP server: see serving_native.py, which compiles and runs it.

   serving_client PORT REQUESTS CONNECTIONS SECONDS            each connection asks again when it is answered
   serving_client PORT REQUESTS CONNECTIONS SECONDS ARRIVALS   a request at each of these times

   REQUESTS: a file of requests as they are sent, each after its length (uint64). ARRIVALS: a file of float64,
   seconds from the start. Prints for each request three float64: when it was sent or was to be sent, the
   seconds from then to the end of its answer, and the answer's status, or 0 if its connection was lost; and at
   last the seconds in all, twice, and -1.

   One thread waits for answers and for the next arrival, to the nanosecond (epoll_pwait2), so that it takes
   little of the server's processor time. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { ANSWER = 1 << 16, EVENTS = 256 };

typedef struct {
    int descriptor;
    long number; /* of the request that it has sent; -1: it is free */
    const char *left;
    size_t bytes; /* of the request that are not sent yet */
    char answer[ANSWER];
    size_t came;
} Connection;

static struct sockaddr_in address;
static int poller;
static double *results; /* begin, seconds, status of each request */
static char **requests;
static uint64_t *lengths;
static long different;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void *file(const char *path, size_t *size) {
    FILE *stream = fopen(path, "rb");
    if (!stream || fseek(stream, 0, SEEK_END)) fail(path);
    *size = ftell(stream);
    rewind(stream);
    char *content = malloc(*size + 1);
    if (!content || fread(content, 1, *size, stream) != *size) fail(path);
    fclose(stream);
    return content;
}

static void join(Connection *own) {
    own->descriptor = socket(AF_INET, SOCK_STREAM, 0);
    int one = 1;
    if (connect(own->descriptor, (void *)&address, sizeof address)) fail("connect");
    setsockopt(own->descriptor, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct epoll_event event = {EPOLLIN, {.ptr = own}};
    epoll_ctl(poller, EPOLL_CTL_ADD, own->descriptor, &event);
    own->number = -1;
    own->came = 0;
}

static void finish(Connection *own, double end, double status) {
    results[3 * own->number + 1] = end - results[3 * own->number];
    results[3 * own->number + 2] = status;
    own->number = -1;
    own->came = 0;
}

static void send_rest(Connection *own) {
    ssize_t sent = send(own->descriptor, own->left, own->bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
        own->left += sent;
        own->bytes -= sent;
    }
    if (own->bytes) { /* the socket is full; a lost connection is told by the poller */
        struct epoll_event event = {EPOLLIN | EPOLLOUT, {.ptr = own}};
        epoll_ctl(poller, EPOLL_CTL_MOD, own->descriptor, &event);
    }
}

static void ask(Connection *own, long number, double begin) {
    own->number = number;
    own->left = requests[number % different];
    own->bytes = lengths[number % different];
    results[3 * number] = begin;
    send_rest(own);
}

/* Take in what came: 1 if the connection's request has its answer now, or has lost it. */
static int heard(Connection *own) {
    ssize_t size = recv(own->descriptor, own->answer + own->came, ANSWER - 1 - own->came, MSG_DONTWAIT);
    if (size < 0 && errno == EAGAIN) return 0;
    if (size <= 0) {
        int waited = own->number >= 0;
        close(own->descriptor);
        if (waited) finish(own, now(), 0);
        join(own);
        return waited;
    }
    own->came += size;
    own->answer[own->came] = 0;
    char *end = memmem(own->answer, own->came, "\r\n\r\n", 4);
    if (!end || own->number < 0) return 0;
    char *length = strcasestr(own->answer, "content-length:");
    if (!length || length > end) {
        fprintf(stderr, "an answer without its length\n");
        exit(1);
    }
    if (own->came < end + 4 - own->answer + strtoul(length + 15, NULL, 10)) return 0;
    finish(own, now(), atoi(own->answer + 9));
    return 1;
}

int main(int count, char **words) {
    if (count < 5) return 2;
    size_t size, arrivals_size = 0;
    char *content = file(words[2], &size);
    int connections = atoi(words[3]);
    double seconds = atof(words[4]), *arrivals = count > 5 ? file(words[5], &arrivals_size) : NULL;
    for (char *at = content; at < content + size; different++) {
        requests = realloc(requests, (different + 1) * sizeof *requests);
        lengths = realloc(lengths, (different + 1) * sizeof *lengths);
        memcpy(&lengths[different], at, 8);
        requests[different] = at + 8;
        at += 8 + lengths[different];
    }
    address = (struct sockaddr_in){AF_INET, htons(atoi(words[1])), {htonl(INADDR_LOOPBACK)}, {0}};
    poller = epoll_create1(0);
    prctl(PR_SET_TIMERSLACK, 1);
    Connection *every = calloc(connections, sizeof *every), **idle = calloc(connections, sizeof *idle);
    int free_ones = connections;
    for (int i = 0; i < connections; i++) {
        join(&every[i]);
        idle[i] = &every[i];
    }
    long most = arrivals ? (long)(arrivals_size / sizeof(double)) : (long)(seconds * 200000) + connections;
    results = calloc(3 * (most + 1), sizeof(double));
    long asked = 0, answered = 0;
    double began = now();
    struct epoll_event events[EVENTS];
    for (;;) {
        double at = now() - began;
        while (free_ones && asked < most && (arrivals ? arrivals[asked] <= at : at < seconds)) {
            Connection *own = idle[--free_ones];
            ask(own, asked, began + (arrivals ? arrivals[asked] : at));
            asked++;
            at = now() - began;
        }
        if (answered == asked && (asked == most || (!arrivals && at >= seconds))) break;
        double wait = arrivals && free_ones && asked < most ? arrivals[asked] - at : 1;
        if (wait < 0) wait = 0;
        struct timespec pause = {(time_t)wait, (long)(1e9 * (wait - (time_t)wait))};
        int found = epoll_pwait2(poller, events, EVENTS, &pause, NULL);
        for (int i = 0; i < found; i++) {
            Connection *own = events[i].data.ptr;
            if (events[i].events & EPOLLOUT) {
                struct epoll_event event = {EPOLLIN, {.ptr = own}};
                epoll_ctl(poller, EPOLL_CTL_MOD, own->descriptor, &event);
                send_rest(own);
            }
            if (events[i].events & ~EPOLLOUT && heard(own)) {
                answered++;
                idle[free_ones++] = own;
            }
        }
    }
    double total = now() - began;
    for (long i = 0; i < asked; i++) results[3 * i] -= began;
    results[3 * asked] = results[3 * asked + 1] = total;
    results[3 * asked + 2] = -1;
    return fwrite(results, sizeof(double), 3 * (asked + 1), stdout) != (size_t)(3 * (asked + 1));
}
