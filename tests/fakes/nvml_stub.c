/* A stand-in for the driver's libnvidia-ml.so.1, for the real nvidia-ml-py.
 *
 * Three cards. What they answer stands in the file that NVML_STUB names; it is read again at every
 * call, so a test changes the answers while a process runs. Lines, in any order, `#` begins a comment:
 *
 *   count 3                      cards there are, at most three
 *   uuid:0 GPU-…   name:0 …      of card 0; `used:0 BYTES`, `total:0 BYTES` its memory
 *   compute:0 PID BYTES          a process on it that computes, as many lines as wanted; BYTES -1 is
 *   graphics:0 PID BYTES         "not available"; one that draws
 *   fail:FUNCTION CODE           the function answers this nvmlReturn_t; FUNCTION:0 for card 0 alone
 *   slow:FUNCTION MILLISECONDS   it takes so long
 *
 * Every call is noted in a file beside it, `.calls`. Structures and symbols are those of nvml.h 12;
 * -DWITHOUT_V3 leaves out what a driver before 510 has not.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { CARDS_MAX = 3, TEXT_MAX = 160, LINE_MAX_BYTES = 512 };

typedef struct { unsigned index; } card_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
} process_t;
typedef struct {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char text[32];
} pci_t;

static card_t cards[CARDS_MAX] = {{0}, {1}, {2}};
static const char *const uuids[] = {"GPU-aaaa1111-0000", "GPU-aaaa2222-0000", "GPU-bbbb3333-0000"};
static const char *const names[] = {"NVIDIA H200", "NVIDIA H200", "NVIDIA T4"};
static const char *const totals[] = {"149250113536", "149250113536", "16106127360"};
static int started;

/* The next line of `key`, from the place that `file` is at; NULL when there is none. */
static char *next_line(FILE *file, const char *key, char *line) {
  size_t length = strlen(key);
  while (fgets(line, LINE_MAX_BYTES, file)) {
    line[strcspn(line, "\n")] = 0;
    if (strncmp(line, key, length) == 0 && line[length] == ' ') return line + length + 1;
  }
  return NULL;
}

static FILE *state(void) {
  const char *path = getenv("NVML_STUB");
  return path ? fopen(path, "re") : NULL;
}

/* The value of a key, or what stands for it. */
static void value(const char *key, const char *otherwise, char *into) {
  char line[LINE_MAX_BYTES], *found = NULL;
  FILE *file = state();
  if (file) found = next_line(file, key, line);
  snprintf(into, TEXT_MAX, "%s", found ? found : otherwise);
  if (file) fclose(file);
}

static unsigned long long number(const char *key, const char *otherwise) {
  char text[TEXT_MAX];
  value(key, otherwise, text);
  return strtoull(text, NULL, 10);
}

static unsigned long long of_card(const char *what, const card_t *card, const char *otherwise) {
  char key[TEXT_MAX];
  snprintf(key, sizeof key, "%s:%u", what, card->index);
  return number(key, otherwise);
}

static void note(const char *function) {
  char path[LINE_MAX_BYTES];
  const char *stub = getenv("NVML_STUB");
  if (!stub) return;
  snprintf(path, sizeof path, "%s.calls", stub);
  FILE *file = fopen(path, "ae");
  if (!file) return;
  fprintf(file, "%s\n", function);
  fclose(file);
}

/* What a function answers before it does anything. */
static int begin(const char *function, const card_t *card) {
  char key[TEXT_MAX];
  note(function);
  snprintf(key, sizeof key, "slow:%s", function);
  unsigned long long wait = number(key, "0");
  struct timespec span = {(time_t)(wait / 1000), (long)(wait % 1000) * 1000000};
  if (wait) nanosleep(&span, NULL);
  snprintf(key, sizeof key, "fail:%s", function);
  int code = (int)number(key, "0");
  if (code == SUCCESS && card) {
    snprintf(key, sizeof key, "fail:%s:%u", function, card->index);
    code = (int)number(key, "0");
  }
  if (code == SUCCESS && !started && strncmp(function, "nvmlInit", 8) != 0) return UNINITIALIZED;
  return code;
}
#define BEGIN(card)                       \
  do {                                    \
    int refused = begin(__func__, card);  \
    if (refused != SUCCESS) return refused; \
  } while (0)

static int copy(const char *what, const card_t *card, const char *otherwise, char *to, unsigned size) {
  char key[TEXT_MAX], text[TEXT_MAX];
  snprintf(key, sizeof key, "%s:%u", what, card->index);
  value(key, otherwise, text);
  if (strlen(text) >= size) return INSUFFICIENT_SIZE;
  memcpy(to, text, strlen(text) + 1);
  return SUCCESS;
}

static int processes(const char *what, const card_t *card, unsigned *count, process_t *into) {
  char key[TEXT_MAX], line[LINE_MAX_BYTES], *found;
  unsigned room = *count, seen = 0;
  snprintf(key, sizeof key, "%s:%u", what, card->index);
  FILE *file = state();
  while (file && (found = next_line(file, key, line))) {
    if (seen < room && into) {
      process_t process = {0, 0, ~0U, ~0U};
      process.pid = (unsigned)strtoul(found, &found, 10);
      process.used = (unsigned long long)strtoll(found, NULL, 10);
      into[seen] = process;
    }
    seen++;
  }
  if (file) fclose(file);
  *count = seen;
  return seen > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  BEGIN(NULL);
  started++;
  return SUCCESS;
}

int nvmlInit_v2(void) {
  BEGIN(NULL);
  started++;
  return SUCCESS;
}

int nvmlShutdown(void) {
  BEGIN(NULL);
  started--;
  return SUCCESS;
}

const char *nvmlErrorString(int code) {
  switch (code) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case 9: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
  }
}

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
  BEGIN(NULL);
  snprintf(version, size, "580.65.06");
  return SUCCESS;
}

int nvmlSystemGetNVMLVersion(char *version, unsigned size) {
  BEGIN(NULL);
  snprintf(version, size, "13.580.65.06");
  return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
  BEGIN(NULL);
  unsigned long long wanted = number("count", "3");
  *count = wanted < CARDS_MAX ? (unsigned)wanted : CARDS_MAX;
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, card_t **card) {
  if (index >= CARDS_MAX || index >= number("count", "3")) return INVALID_ARGUMENT;
  BEGIN(&cards[index]);
  *card = &cards[index];
  return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, card_t **card) {
  BEGIN(NULL);
  for (unsigned i = 0; i < number("count", "3") && i < CARDS_MAX; i++) {
    char own[TEXT_MAX];
    if (copy("uuid", &cards[i], uuids[i], own, sizeof own) == SUCCESS && strcmp(own, uuid) == 0) {
      *card = &cards[i];
      return SUCCESS;
    }
  }
  return NOT_FOUND;
}

int nvmlDeviceGetIndex(card_t *card, unsigned *index) {
  BEGIN(card);
  *index = card->index;
  return SUCCESS;
}

int nvmlDeviceGetUUID(card_t *card, char *uuid, unsigned size) {
  BEGIN(card);
  return copy("uuid", card, uuids[card->index], uuid, size);
}

int nvmlDeviceGetName(card_t *card, char *name, unsigned size) {
  BEGIN(card);
  return copy("name", card, names[card->index], name, size);
}

int nvmlDeviceGetPciInfo_v3(card_t *card, pci_t *pci) {
  BEGIN(card);
  memset(pci, 0, sizeof *pci);
  pci->bus = card->index + 1;
  pci->id = 0x233510DEU;
  snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", pci->bus);
  snprintf(pci->text, sizeof pci->text, "00000000:%02X:00.0", pci->bus);
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(card_t *card, memory_t *memory) {
  BEGIN(card);
  memory->total = of_card("total", card, totals[card->index]);
  memory->used = of_card("used", card, "0");
  memory->free = memory->total - memory->used;
  return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(card_t *card, unsigned *count, process_t *into) {
  BEGIN(card);
  return processes("compute", card, count, into);
}

int nvmlDeviceGetGraphicsRunningProcesses_v2(card_t *card, unsigned *count, process_t *into) {
  BEGIN(card);
  return processes("graphics", card, count, into);
}

#ifndef WITHOUT_V3
int nvmlDeviceGetComputeRunningProcesses_v3(card_t *card, unsigned *count, process_t *into) {
  BEGIN(card);
  return processes("compute", card, count, into);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(card_t *card, unsigned *count, process_t *into) {
  BEGIN(card);
  return processes("graphics", card, count, into);
}
#endif

int nvmlDeviceGetMigMode(card_t *card, unsigned *current, unsigned *pending) {
  BEGIN(card);
  *current = *pending = 0;
  return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(card_t *card, unsigned *count) {
  BEGIN(card);
  *count = 0;
  return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(card_t *card, unsigned index, card_t **instance) {
  (void)index;
  (void)instance;
  BEGIN(card);
  return NOT_FOUND;
}
