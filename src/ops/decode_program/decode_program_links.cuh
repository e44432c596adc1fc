// How stages of a launch depend on each other, from the memory that they read and write: what goes by mail,
// and which counters are awaited. On the host.
#pragma once

#include <span>
#include <vector>

#include "ops/decode_program/decode_program_kernel.cuh"
#include "tensor/tensor.h"

namespace sps::ops::decode_program {

// Rows that a stage reads or writes. Of a product x is the first that is read, y the first that is written; a
// sum's y is the second that is read.
struct Touched {
  std::vector<Tensor> reads, writes;
};

class Links {
 public:
  // Of stages that follow each other, whose counters count up to `arrivals`.
  Links(std::span<const Touched> touched, std::span<Stage* const> stages, std::span<const int32_t> arrivals)
      : touched_(touched), stages_(stages), arrivals_(arrivals) {}

  // Fills in what the stages await and where their mail lies, `mail_bytes` of it. Without mail, and where
  // something is read in another shape than it was written in or an order does not follow from what is waited
  // for, every stage waits for all of the one before.
  void make(bool mail) {
    if (!mail || !by_mail()) one_after_the_other();
  }
  int64_t mail_bytes = 0;

 private:
  // Which row of `whole` some of its rows begin with; -1 where they are none.
  static int64_t row_within(const Tensor& whole, const Tensor& rows) {
    if (whole.cols != rows.cols || whole.stride != rows.stride || whole.dtype != rows.dtype) return -1;
    const int64_t bytes = static_cast<const char*>(rows.data) - static_cast<const char*>(whole.data),
                  step = whole.stride * int64_t(dtype_size(whole.dtype)), row = bytes / step;
    return bytes < 0 || bytes % step != 0 || row + rows.rows > whole.rows ? -1 : row;
  }
  static bool same(const Tensor& a, const Tensor& b) { return row_within(a, b) == 0 && a.rows == b.rows; }
  static bool overlap(const Tensor& a, const Tensor& b) {
    const auto begin = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data); };
    const auto end = [&](const Tensor& t) {
      return begin(t) + size_t((t.rows - 1) * t.stride + t.cols) * dtype_size(t.dtype);
    };
    return a.rows > 0 && b.rows > 0 && begin(a) < end(b) && begin(b) < end(a);
  }
  static bool overlap(const std::vector<Tensor>& some, const Tensor& t) {
    for (const Tensor& one : some)
      if (overlap(one, t)) return true;
    return false;
  }
  // A product whose y may go by mail: a reader finds all of it.
  bool mails(size_t n) const {
    return !stages_[n]->attends && stages_[n]->product.end != DecodeEnd::store &&
           stages_[n]->product.outputs % kFeatures == 0;
  }

  bool by_mail() {
    const size_t n = stages_.size();
    // after[j][i]: when j has written anything, all of i is over.
    std::vector<std::vector<bool>> after(n, std::vector<bool>(n));
    std::vector<std::vector<bool>> reads_memory(n);  // by tensor that is read: not by mail
    size_t attention = n;                            // the last one
    for (size_t j = 0; j < n; ++j) {
      Stage& s = *stages_[j];
      const auto waits_for = [&](size_t i) {
        after[j][i] = true;
        for (size_t k = 0; k < i; ++k) after[j][k] = after[j][k] || after[i][k];
      };
      int awaited = 0;
      const auto await = [&](size_t i) {
        for (int a = 0; a < awaited; ++a)
          if (s.awaited[a].stage == int32_t(i)) return true;
        if (awaited == kMostAwaited) return false;
        s.awaited[awaited++] = {int32_t(i), arrivals_[i]};
        stages_[i]->arrives = true;
        waits_for(i);
        return true;
      };
      s.arrives = false;
      for (size_t r = 0; r < touched_[j].reads.size(); ++r) {
        const Tensor& t = touched_[j].reads[r];
        reads_memory[j].push_back(true);
        // Back to who has written all of it.
        for (size_t i = j; i-- > 0;) {
          const std::vector<Tensor>& writes = touched_[i].writes;
          if (!overlap(writes, t)) continue;
          const int64_t row = row_within(writes[0], t);
          if (mails(i)) {
            if (row < 0 || s.attends) return false;
            int32_t& mail = stages_[i]->y_mail;
            const int64_t of_row = t.cols * int64_t(dtype_size(t.dtype));  // whole vectors
            if (mail < 0) mail = int32_t(mail_bytes), mail_bytes += writes[0].rows * of_row;
            (r == 0 ? s.x_mail : s.old_mail) = mail + int32_t(row * of_row);
            reads_memory[j][r] = false;
            if (r == 0) waits_for(i);
          } else if (!after[j][i] && !await(i)) {
            return false;
          }
          if (row >= 0) break;
        }
      }
      if (s.attends) {
        if (attention != n && !after[j][attention]) return false;  // its partial sums lie in the same place
        attention = j;
      }
      for (size_t i = 0; i < j; ++i)
        for (const Tensor& t : touched_[j].writes) {
          if (overlap(touched_[i].writes, t)) {
            if (mails(i) && same(touched_[i].writes[0], t))
              stages_[i]->keeps = false;
            else if (!after[j][i])
              return false;
          }
          for (size_t r = 0; r < touched_[i].reads.size(); ++r)
            if (reads_memory[i][r] && overlap(touched_[i].reads[r], t) && !after[j][i]) return false;
        }
    }
    return true;
  }

  void one_after_the_other() {
    mail_bytes = 0;
    for (size_t n = 0; n < stages_.size(); ++n) {
      Stage& s = *stages_[n];
      s.arrives = s.keeps = true;
      s.x_mail = s.old_mail = s.y_mail = -1;
      for (Stage::Await& a : s.awaited) a = {};
      if (n > 0) s.awaited[0] = {int32_t(n - 1), arrivals_[n - 1]};
    }
  }

  std::span<const Touched> touched_;
  std::span<Stage* const> stages_;
  std::span<const int32_t> arrivals_;
};

}  // namespace sps::ops::decode_program
