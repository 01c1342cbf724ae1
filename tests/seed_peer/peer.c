/*
 * A peer of the seed: what an independent author writes from the published description alone.
 *
 * The struct follows the field list in natural C alignment, the claim rule is a compare-and-swap on pid for a free
 * slot or for one whose heartbeat is older than 3 s by the wall clock, and the pacing is the deterministic grid. It
 * knows no byte locks and no extension. Source: "GPU-share - zero-conf coordination between opencoti-llamafile
 * peers", sections 3 and 4.
 *
 * As a program it obeys lines on standard input (`work`, `idle`, `weight W`, `snapshot`) and prints one JSON object
 * a line; the end of the input ends it, and its slot is given back. As a library (-shared -DSEED_LIBRARY) it is the
 * claim rule alone, for the harness that counts double claims.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 16, BYTES = 4096, BEAT_US = 500000, ACTIVE_US = 2000000, REPORT_US = 50000 };

struct header { char magic[6]; uint32_t version; uint32_t slot_count; };
struct slot {
    _Atomic uint32_t pid;
    _Atomic int64_t boot_us;
    _Atomic float weight;
    _Atomic uint32_t active;
    _Atomic int64_t heartbeat_us;
    _Atomic uint32_t busy_ppm;
    char name[48];
};
struct registry { struct header header; struct slot slots[SLOTS]; };

/* 3 s; the harness scales it down. */
int64_t seed_dead_us = 3000000;

static int64_t clock_us(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static int64_t wall_us(void) { return clock_us(CLOCK_REALTIME); }

/* What glibc's shm_open does with a name, in a directory of the caller's choice. NULL: not a registry. */
struct registry *seed_open(const char *path) {
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    struct stat status;
    if (file < 0 || fstat(file, &status) != 0) return NULL;
    if (status.st_size < BYTES && ftruncate(file, BYTES) != 0) return NULL;
    struct registry *shared = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (shared == MAP_FAILED) return NULL;
    if (shared->header.magic[0] == 0) {
        memcpy(shared->header.magic, "OCGPU", 6);
        shared->header.version = 1;
        shared->header.slot_count = SLOTS;
    }
    int ours = memcmp(shared->header.magic, "OCGPU", 6) == 0 && shared->header.version == 1;
    return ours ? shared : NULL;
}

static int alive(struct slot *slot, int64_t now) {
    return slot->pid != 0 && now - slot->heartbeat_us <= seed_dead_us;
}

/* The slot, or -1 when all are taken. */
int seed_claim(struct registry *shared, uint32_t pid, float weight, const char *name) {
    for (int i = 0; i < SLOTS; i++) {
        struct slot *slot = &shared->slots[i];
        uint32_t owner = slot->pid;
        if (owner != 0 && alive(slot, wall_us())) continue;
        if (!atomic_compare_exchange_strong(&slot->pid, &owner, pid)) continue;
        slot->boot_us = slot->heartbeat_us = wall_us();
        slot->weight = weight;
        slot->active = slot->busy_ppm = 0;
        strncpy(slot->name, name, sizeof slot->name - 1);
        slot->name[sizeof slot->name - 1] = 0;
        return i;
    }
    return -1;
}

void seed_beat(struct registry *shared, int slot) { shared->slots[slot].heartbeat_us = wall_us(); }

/* Whether the slot still names this pid. */
int seed_owns(struct registry *shared, int slot, uint32_t pid) { return shared->slots[slot].pid == pid; }

void seed_release(struct registry *shared, int slot, uint32_t pid) {
    shared->slots[slot].active = 0;
    atomic_compare_exchange_strong(&shared->slots[slot].pid, &pid, 0);
}

#ifndef SEED_LIBRARY

static struct registry *shared;
static _Atomic int mine = -1, working, ended;
static _Atomic int64_t last_step_us, busy_us;
static _Atomic float weight = 1;
static const char *name = "seed";
static int stubborn;
static pthread_mutex_t output = PTHREAD_MUTEX_INITIALIZER;

/* Shares of all slots, 0 where not alive and active; the count of those that are. */
static int shares(double share[SLOTS]) {
    double sum = 0, floored = 0;
    int count = 0;
    int64_t now = wall_us();
    for (int i = 0; i < SLOTS; i++) {
        share[i] = alive(&shared->slots[i], now) && shared->slots[i].active ? shared->slots[i].weight : 0;
        sum += share[i];
        count += share[i] > 0;
    }
    for (int i = 0; i < SLOTS; i++) {
        if (share[i] > 0) share[i] = share[i] / sum < 0.10 ? 0.10 : share[i] / sum;
        floored += share[i];
    }
    for (int i = 0; i < SLOTS && floored > 0; i++) share[i] /= floored;
    return count;
}

/* Microseconds until the own window begins; 0 inside it, and when there is nobody to share with. */
static int64_t until_window(void) {
    double share[SLOTS], smallest = 1, start = 0;
    if (shares(share) < 2 || share[mine] <= 0) return 0;
    for (int i = 0; i < SLOTS; i++)
        if (share[i] > 0 && share[i] < smallest) smallest = share[i];
    int64_t period = (int64_t)(40000 / smallest + 0.5);
    period = period < 80000 ? 80000 : period > 400000 ? 400000 : period;
    for (int i = 0; i < mine; i++) start += share[i] * period;
    int64_t at = wall_us() % period, begin = (int64_t)start, end = (int64_t)(start + share[mine] * period);
    if (at >= begin && at < end) return 0;
    return (begin - at + period) % period;
}

static void sleep_us(int64_t us) {
    struct timespec span = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&span, NULL);
}

static void *heartbeat(void *unused) {
    int64_t busy_before = 0;
    (void)unused;
    while (!ended) {
        if (!stubborn && !seed_owns(shared, mine, getpid())) {
            int found = seed_claim(shared, getpid(), weight, name);
            if (found >= 0) mine = found;
        }
        struct slot *slot = &shared->slots[mine];
        slot->active = wall_us() - last_step_us <= ACTIVE_US;
        slot->busy_ppm = (uint32_t)((busy_us - busy_before) * 1000000 / BEAT_US);
        busy_before = busy_us;
        seed_beat(shared, mine);
        sleep_us(BEAT_US);
    }
    return NULL;
}

static void print_peer(int i, double share) {
    struct slot *slot = &shared->slots[i];
    char shown[sizeof slot->name];
    memcpy(shown, slot->name, sizeof shown);
    for (char *at = shown; *at; at++)
        if ((unsigned char)*at < ' ' || *at == '"' || *at == '\\') *at = '?';
    int64_t now = wall_us();
    printf("{\"slot\": %d, \"pid\": %u, \"name\": \"%.47s\", \"weight\": %g, \"share_pct\": %.4f, \"active\": %s, "
           "\"alive\": %s, \"busy_pct\": %.1f, \"heartbeat_age_ms\": %lld}",
           i, slot->pid, shown, slot->weight, 100 * share, slot->active ? "true" : "false",
           alive(slot, now) ? "true" : "false", slot->busy_ppm / 1e4, (long long)(now - slot->heartbeat_us) / 1000);
}

static void print_snapshot(void) {
    double share[SLOTS];
    const char *between = "";
    shares(share);
    pthread_mutex_lock(&output);
    printf("{\"snapshot\": {\"self\": ");
    print_peer(mine, share[mine]);
    printf(", \"peers\": [");
    for (int i = 0; i < SLOTS; i++) {
        if (i == mine || shared->slots[i].pid == 0) continue;
        printf("%s", between);
        print_peer(i, share[i]);
        between = ", ";
    }
    printf("]}}\n");
    pthread_mutex_unlock(&output);
}

static void *obey(void *unused) {
    char line[256];
    (void)unused;
    while (fgets(line, sizeof line, stdin)) {
        if (strncmp(line, "work", 4) == 0) working = 1;
        else if (strncmp(line, "idle", 4) == 0) working = 0;
        else if (strncmp(line, "weight ", 7) == 0) shared->slots[mine].weight = weight = strtof(line + 7, NULL);
        else if (strncmp(line, "snapshot", 8) == 0) print_snapshot();
    }
    ended = 1;
    return NULL;
}

static void report(long steps, int64_t slept_us) {
    pthread_mutex_lock(&output);
    printf("{\"t\": %.6f, \"steps\": %ld, \"slept\": %.6f}\n", clock_us(CLOCK_MONOTONIC) / 1e6, steps, slept_us / 1e6);
    pthread_mutex_unlock(&output);
}

/* One step costs this much of the core's time, whoever else runs there; then the gate. Returns the time slept. */
static int64_t step(int64_t cost_us) {
    int64_t started = wall_us(), until = clock_us(CLOCK_THREAD_CPUTIME_ID) + cost_us, slept = wall_us();
    while (clock_us(CLOCK_THREAD_CPUTIME_ID) < until) {}
    last_step_us = wall_us();
    busy_us += last_step_us - started;
    shared->slots[mine].active = 1;
    slept = wall_us();
    for (int64_t wait; !ended && (wait = until_window()) > 0;) sleep_us(wait);
    return wall_us() - slept;
}

static void print_layout(void) {
#define AT(field) printf("\"%s\": [%zu, %zu], ", #field, offsetof(struct slot, field), sizeof((struct slot *)0)->field)
    printf("{");
    AT(pid), AT(boot_us), AT(weight), AT(active), AT(heartbeat_us), AT(busy_ppm), AT(name);
    printf("\"version\": [%zu, 4], ", offsetof(struct header, version));
    printf("\"slot_count\": [%zu, 4], ", offsetof(struct header, slot_count));
    printf("\"slots\": [%zu, %zu], ", offsetof(struct registry, slots), sizeof(struct slot));
    printf("\"end\": [%zu, 0]}\n", sizeof(struct registry));
}

int main(int count, char **words) {
    const char *path = NULL;
    double step_ms = 9;
    for (int i = 1; i < count; i++) {
        const char *value = i + 1 < count ? words[i + 1] : "";
        if (strcmp(words[i], "--layout") == 0) return print_layout(), 0;
        else if (strcmp(words[i], "--stubborn") == 0) { stubborn = 1; continue; }
        else if (strcmp(words[i], "--segment") == 0) path = value;
        else if (strcmp(words[i], "--name") == 0) name = value;
        else if (strcmp(words[i], "--weight") == 0) weight = strtof(value, NULL);
        else if (strcmp(words[i], "--step-ms") == 0) step_ms = atof(value);
        else if (strcmp(words[i], "--core") == 0) {
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(atoi(value), &one);
            sched_setaffinity(0, sizeof one, &one);
        } else return fprintf(stderr, "unknown option: %s\n", words[i]), 2;
        i++;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (path == NULL || (shared = seed_open(path)) == NULL) return fprintf(stderr, "no registry: %s\n", path), 3;
    if ((mine = seed_claim(shared, getpid(), weight, name)) < 0) return fprintf(stderr, "all slots are taken\n"), 4;
    pthread_t threads[2];
    pthread_create(&threads[0], NULL, heartbeat, NULL);
    pthread_create(&threads[1], NULL, obey, NULL);
    long steps = 0;
    int64_t slept = 0, reported = 0;
    report(steps, slept);
    while (!ended) {
        if (!working) { sleep_us(2000); continue; }
        slept += step((int64_t)(step_ms * 1000));
        steps++;
        if (wall_us() - reported >= REPORT_US) reported = wall_us(), report(steps, slept);
    }
    seed_release(shared, mine, getpid());
    return 0;
}
#endif
