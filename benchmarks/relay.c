/* Links between a main server and its shards: each has a rate and a delay, and all share the main server's own.

   relay MBIT_PER_S DELAY_US LISTEN:[ADDRESS:]TARGET...

   LISTEN and TARGET are ports, of this machine or (LISTEN at all of its addresses) of another one; 0 Mbit/s: no
   limit. A byte leaves when the bytes before it have left both its link and the main server's, and arrives after
   the delay. Both directions have the whole rate. A line of two numbers on its input gives links that rate and
   delay from then on. At SIGTERM it prints the seconds of CPU time that it took. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MOST 512       /* connections */
#define PIECE 65536    /* bytes that are read at a time */
#define INPUT (64 + 2 * MOST)
#define AHEAD 8388608  /* bytes on their way, beyond which nothing more is read */

typedef struct Chunk {
    double due;
    size_t length, sent;
    struct Chunk *next;
    char data[];
} Chunk;

typedef struct { /* one direction of a connection */
    int from, to, ended, link, direction;
    size_t queued;
    Chunk *head, *tail;
} Way;

static Way ways[2 * MOST];
static int used[MOST], listening[64], links;
static struct sockaddr_in target[64];
static double rate, delay, of_link[64][2], of_main[2];
static volatile sig_atomic_t stopped;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void stop(int number) { (void)number; stopped = 1; }

static void failed(const char *what) { perror(what); exit(1); }

static void limit(double mbit, double us) { rate = mbit * 1e6 / 8; delay = us * 1e-6; }

/* A line of its input. */
static void hear(int epoll) {
    char line[128] = "";
    double mbit, us;
    ssize_t got = read(0, line, sizeof line - 1);
    if (got <= 0) epoll_ctl(epoll, EPOLL_CTL_DEL, 0, NULL);
    else if (sscanf(line, "%lf %lf", &mbit, &us) == 2) limit(mbit, us);
}

static double leaves(Way *way, size_t bytes, double at) {
    if (rate <= 0) return at;
    double took = bytes / rate, *own = &of_link[way->link][way->direction], *all = &of_main[way->direction];
    *own = (*own > at ? *own : at) + took;
    *all = (*all > at ? *all : at) + took;
    return *own > *all ? *own : *all;
}

static void drop(int pair) {
    for (int i = 0; i < 2; i++) {
        Way *way = &ways[2 * pair + i];
        while (way->head) { Chunk *next = way->head->next; free(way->head); way->head = next; }
    }
    close(ways[2 * pair].from);
    close(ways[2 * pair].to);
    used[pair] = 0;
}

static void take(int epoll, int link) {
    int came = accept4(listening[link], NULL, NULL, SOCK_NONBLOCK), pair = 0, one = 1;
    if (came < 0) return;
    while (pair < MOST && used[pair]) pair++;
    int other = socket(AF_INET, SOCK_STREAM, 0);
    if (pair == MOST || connect(other, (struct sockaddr *)&target[link], sizeof target[link])) { close(came); close(other); return; }
    fcntl(other, F_SETFL, O_NONBLOCK);
    setsockopt(came, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(other, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    used[pair] = 1;
    ways[2 * pair] = (Way){.from = came, .to = other, .link = link, .direction = 0};
    ways[2 * pair + 1] = (Way){.from = other, .to = came, .link = link, .direction = 1};
    for (int i = 0; i < 2; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = 64 + 2 * pair + i};
        epoll_ctl(epoll, EPOLL_CTL_ADD, ways[2 * pair + i].from, &event);
    }
}

static void receive(int epoll, Way *way) {
    Chunk *chunk = malloc(sizeof *chunk + PIECE);
    ssize_t got = recv(way->from, chunk->data, PIECE, 0);
    if (got <= 0) {
        free(chunk);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
        way->ended = 1;
        epoll_ctl(epoll, EPOLL_CTL_DEL, way->from, NULL);
        return;
    }
    *chunk = (Chunk){.due = leaves(way, got, now()) + delay, .length = got};
    if (way->head) way->tail->next = chunk; else way->head = chunk;
    way->tail = chunk;
    way->queued += got;
}

/* Sends what is due; when the next of it is, or 1e18. */
static double deliver(void) {
    double next = 1e18;
    for (int pair = 0; pair < MOST; pair++) {
        int lost = 0;
        for (int i = 0; used[pair] && i < 2; i++) {
            Way *way = &ways[2 * pair + i];
            while (way->head) {
                Chunk *chunk = way->head;
                double at = now();
                if (chunk->due > at) { if (chunk->due < next) next = chunk->due; break; }
                ssize_t sent = send(way->to, chunk->data + chunk->sent, chunk->length - chunk->sent, MSG_NOSIGNAL);
                if (sent < 0 && errno == EAGAIN) { if (at + 5e-5 < next) next = at + 5e-5; break; }
                if (sent < 0) { lost = 1; break; }
                chunk->sent += sent;
                if (chunk->sent < chunk->length) continue;
                way->queued -= chunk->length;
                way->head = chunk->next;
                free(chunk);
            }
            if (way->ended && !way->head) lost = 1;
        }
        if (lost) drop(pair);
    }
    return next;
}

int main(int count, char **words) {
    if (count < 4) { fprintf(stderr, "relay MBIT_PER_S DELAY_US LISTEN:TARGET...\n"); return 2; }
    limit(atof(words[1]), atof(words[2]));
    prctl(PR_SET_TIMERSLACK, 1);
    signal(SIGTERM, stop);
    signal(SIGINT, stop);
    int epoll = epoll_create1(0), one = 1;
    for (; links < count - 3 && links < 64; links++) {
        int port, other;
        char address[64] = "127.0.0.1", *word = words[3 + links];
        int local = sscanf(word, "%d:%63[0-9.]:%d", &port, address, &other) != 3;
        if (local && sscanf(word, "%d:%d", &port, &other) != 2) failed("LISTEN:[ADDRESS:]TARGET");
        if (local) strcpy(address, "127.0.0.1");
        target[links] = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(other)};
        if (inet_pton(AF_INET, address, &target[links].sin_addr) != 1) failed("ADDRESS");
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
        at.sin_addr.s_addr = htonl(local ? INADDR_LOOPBACK : INADDR_ANY);
        listening[links] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        setsockopt(listening[links], SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(listening[links], (struct sockaddr *)&at, sizeof at) || listen(listening[links], 64)) failed("listen");
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = links};
        epoll_ctl(epoll, EPOLL_CTL_ADD, listening[links], &event);
    }
    struct epoll_event input = {.events = EPOLLIN, .data.u32 = INPUT};
    epoll_ctl(epoll, EPOLL_CTL_ADD, 0, &input); /* a file cannot be waited for, and says nothing */
    printf("relaying\n");
    fflush(stdout);
    while (!stopped) {
        double next = deliver(), left = next - now();
        struct timespec wait = {0, 0};
        if (left > 0) { wait.tv_sec = left > 1 ? 1 : 0; wait.tv_nsec = left > 1 ? 0 : (long)(left * 1e9); }
        struct epoll_event events[64];
        int came = epoll_pwait2(epoll, events, 64, &wait, NULL);
        for (int i = 0; i < came; i++) {
            unsigned who = events[i].data.u32;
            if (who < 64) take(epoll, who);
            else if (who == INPUT) hear(epoll);
            else if (used[(who - 64) / 2] && ways[who - 64].queued < AHEAD) receive(epoll, &ways[who - 64]);
        }
    }
    struct rusage own;
    getrusage(RUSAGE_SELF, &own);
    printf("%.3f\n", own.ru_utime.tv_sec + own.ru_stime.tv_sec + 1e-6 * (own.ru_utime.tv_usec + own.ru_stime.tv_usec));
    return 0;
}
