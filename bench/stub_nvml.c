/* A libnvidia-ml.so.1 of eight invented H200 for bench/exporter.py: the real pynvml talks to it. It answers at once, so
   what is measured is the exporters' own work and not the driver's. What is not here is "function not found". */

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CARDS 8
#define LINKS 18
#define OK 0
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define TOO_SMALL 7
#define TIMEOUT 10

typedef struct { int index; } Card;
static Card cards[CARDS] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;
typedef struct {
  uint32_t field, scope; int64_t timestamp, latency; int type, result; union { double d; unsigned long long u; } value;
} Field;
typedef struct { unsigned id; int result; double value; const char *names[3]; } Metric;
typedef struct { unsigned version, count; void *before, *now; Metric metrics[]; } Metrics;
typedef struct { unsigned version, supported; } Support;

static unsigned long long ticks(void) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return (unsigned long long)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlInit_v2(void) { return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int error) { return "stub"; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { return snprintf(text, length, "580.159.04"), OK; }
int nvmlSystemGetCudaDriverVersion(int *version) { return *version = 13000, OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 13000, OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = CARDS, OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Card **card) {
  return index < CARDS ? (*card = &cards[index], OK) : INVALID_ARGUMENT;
}
int nvmlDeviceGetIndex(Card *card, unsigned *index) { return *index = card->index, OK; }
int nvmlDeviceGetName(Card *card, char *text, unsigned length) { return snprintf(text, length, "NVIDIA H200"), OK; }
int nvmlDeviceGetUUID(Card *card, char *text, unsigned length) {
  return snprintf(text, length, "GPU-00000000-0000-4000-8000-%012d", card->index), OK;
}
int nvmlDeviceGetPciInfo_v3(Card *card, Pci *pci) {
  memset(pci, 0, sizeof *pci);
  pci->bus = 0x19 + card->index;
  snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", pci->bus);
  snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", pci->bus);
  return OK;
}
int nvmlDeviceGetMemoryInfo(Card *card, Memory *memory) {
  *memory = (Memory){150ull << 30, 30ull << 30, 120ull << 30};
  return OK;
}
int nvmlDeviceGetMemoryInfo_v2(Card *card, Memory2 *memory) {
  *memory = (Memory2){memory->version, 150ull << 30, 1ull << 30, 29ull << 30, 120ull << 30};
  return OK;
}
int nvmlDeviceGetUtilizationRates(Card *card, Utilization *rates) { return rates->gpu = 97, rates->memory = 55, OK; }
int nvmlDeviceGetPowerUsage(Card *card, unsigned *watts) { return *watts = 612000 + ticks() % 997, OK; }
int nvmlDeviceGetEnforcedPowerLimit(Card *card, unsigned *watts) { return *watts = 700000, OK; }
int nvmlDeviceGetPowerManagementLimit(Card *card, unsigned *watts) { return *watts = 700000, OK; }
int nvmlDeviceGetTotalEnergyConsumption(Card *card, unsigned long long *energy) { return *energy = ticks(), OK; }
int nvmlDeviceGetTemperature(Card *card, int sensor, unsigned *celsius) { return *celsius = 61, OK; }
int nvmlDeviceGetClockInfo(Card *card, int clock, unsigned *mhz) { return *mhz = clock == 2 ? 3201 : 1830, OK; }
int nvmlDeviceGetMaxClockInfo(Card *card, int clock, unsigned *mhz) { return *mhz = clock == 2 ? 3201 : 1980, OK; }
int nvmlDeviceGetCurrentClocksEventReasons(Card *card, unsigned long long *reasons) { return *reasons = 4, OK; }
int nvmlDeviceGetCurrentClocksThrottleReasons(Card *card, unsigned long long *reasons) { return *reasons = 4, OK; }
int nvmlDeviceGetPerformanceState(Card *card, int *state) { return *state = 0, OK; }
int nvmlDeviceGetTotalEccErrors(Card *card, int kind, int counter, unsigned long long *n) { return *n = 0, OK; }
int nvmlDeviceGetRemappedRows(Card *card, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  return *corrected = *uncorrected = *pending = *failed = 0, OK;
}
int nvmlDeviceGetRetiredPages(Card *card, int cause, unsigned *count, void *pages) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkState(Card *card, unsigned link, unsigned *up) {
  return link < LINKS ? (*up = 1, OK) : INVALID_ARGUMENT;
}
int nvmlDeviceGetCurrPcieLinkGeneration(Card *card, unsigned *n) { return *n = 5, OK; }
int nvmlDeviceGetCurrPcieLinkWidth(Card *card, unsigned *n) { return *n = 16, OK; }
int nvmlDeviceGetPcieReplayCounter(Card *card, unsigned *n) { return *n = 0, OK; }
int nvmlDeviceGetPcieThroughput(Card *card, int way, unsigned *n) { return *n = 1000, OK; }
int nvmlDeviceGetMigMode(Card *card, unsigned *now, unsigned *later) { return *now = *later = 0, OK; }
int nvmlDeviceGetEncoderUtilization(Card *card, unsigned *share, unsigned *period) { return *share = *period = 0, OK; }
int nvmlDeviceGetDecoderUtilization(Card *card, unsigned *share, unsigned *period) { return *share = *period = 0, OK; }
int nvmlDeviceGetFanSpeed(Card *card, unsigned *share) { return NOT_SUPPORTED; }
int nvmlDeviceGetGraphicsRunningProcesses_v3(Card *card, unsigned *count, Process *found) { return *count = 0, OK; }
int nvmlDeviceGetComputeRunningProcesses_v3(Card *card, unsigned *count, Process *found) {
  if (!found || !*count) return *count = 1, TOO_SMALL;
  *count = 1;
  *found = (Process){(unsigned)getpid(), 119ull << 30, ~0u, ~0u};
  return OK;
}
int nvmlDeviceGetFieldValues(Card *card, int count, Field *fields) {
  for (int i = 0; i < count; i++) {
    int known = fields[i].field == 82 || fields[i].field == 138 || fields[i].field == 139;
    fields[i].result = known ? OK : NOT_SUPPORTED;
    fields[i].type = 3;
    fields[i].value.u = fields[i].field == 82 ? 67 : ticks();
  }
  return OK;
}
int nvmlGpmQueryDeviceSupport(Card *card, Support *support) { return support->supported = 1, OK; }
int nvmlGpmSampleAlloc(void **sample) { return *sample = cards, OK; }
int nvmlGpmSampleGet(Card *card, void *sample) { return OK; }
int nvmlGpmMetricsGet(Metrics *asked) {
  for (unsigned i = 0; i < asked->count; i++) asked->metrics[i].result = OK, asked->metrics[i].value = 42.0;
  return OK;
}
int nvmlEventSetCreate(void **events) { return *events = cards, OK; }
int nvmlDeviceRegisterEvents(Card *card, unsigned long long kinds, void *events) { return OK; }
int nvmlEventSetWait_v2(void *events, void *data, unsigned milliseconds) {
  return usleep(milliseconds * 1000), TIMEOUT;
}
int nvmlEventSetFree(void *events) { return OK; }
